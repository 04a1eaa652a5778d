// Vectors of one instruction level, and the arithmetic every kernel shares.
//
// This header is compiled once per level (baseline, v3, v4) into namespace xllm::XLLM_LEVEL, so it must not use the
// C++ library: an inline function shared between levels could be kept in the variant an older processor cannot run.
//
// What makes results reproducible:
//  - a group is always 16 lanes (`Group`), however wide the registers are, and reductions over it have one fixed tree;
//  - products and sums are fused only through `fma` (the build has -ffp-contract=off);
//  - the tail of a row runs through the same vector code as its body, over a padded copy.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef XLLM_LEVEL
#error "XLLM_LEVEL names the instruction level this file is compiled for"
#endif
#define XLLM_INLINE [[gnu::always_inline]] inline

#include "kernels.h"

namespace xllm::XLLM_LEVEL {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kGroup = 16;
constexpr int kParts = kGroup / kLanes;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UintVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));

XLLM_INLINE float to_float(float x) { return x; }

XLLM_INLINE float to_float(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

XLLM_INLINE Vec splat(float x) { return x - Vec{}; }

/// a · b + c with one rounding (two on x86 without FMA).
XLLM_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

/// The larger of each pair; a where they compare equal or unordered.
XLLM_INLINE Vec larger(Vec a, Vec b) { return b > a ? b : a; }

XLLM_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

XLLM_INLINE Vec load(const Bf16* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // GCC's own conversion of eight lanes takes five instructions
  const UintVec wide = (UintVec)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(p)));
#else
  HalfVec half;
  std::memcpy(&half, p, sizeof half);
  const UintVec wide = __builtin_convertvector(half, UintVec);
#endif
  return (Vec)(wide << 16);
}

XLLM_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

/// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
XLLM_INLINE void store(Bf16* p, Vec v) {
  const UintVec bits = (UintVec)v;
  const UintVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const UintVec quiet = (bits >> 16) | 0x40u;
  const HalfVec half = __builtin_convertvector(v == v ? rounded : quiet, HalfVec);
  std::memcpy(p, &half, sizeof half);
}

/// Sixteen lanes.
struct Group {
  Vec part[kParts];
};

template <class T>
XLLM_INLINE Group load_group(const T* p) {
  Group g;
  for (int i = 0; i < kParts; ++i) g.part[i] = load(p + i * kLanes);
  return g;
}

template <class T>
XLLM_INLINE void store_group(T* p, const Group& g) {
  for (int i = 0; i < kParts; ++i) store(p + i * kLanes, g.part[i]);
}

XLLM_INLINE Group splat_group(float x) {
  Group g;
  for (int i = 0; i < kParts; ++i) g.part[i] = splat(x);
  return g;
}

/// Lane i becomes lane (i + by) mod kLanes.
template <int By>
XLLM_INLINE Vec rotate(Vec v) {
#if defined(__clang__)
  Vec turned;
  for (int i = 0; i < kLanes; ++i) turned[i] = v[(i + By) % kLanes];
  return turned;
#else
  IntVec from;
  for (int i = 0; i < kLanes; ++i) from[i] = (i + By) % kLanes;
  return __builtin_shuffle(v, from);
#endif
}

/// All lanes in one by halving: pairs (i, i + 8), then (i, i + 4), (i, i + 2), (i, i + 1), whatever the registers' width.
template <class Join>
XLLM_INLINE float reduce(Group g, Join join) {
  for (int half = kParts / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) g.part[i] = join(g.part[i], g.part[i + half]);
  Vec v = g.part[0];
  if constexpr (kLanes > 8) v = join(v, rotate<kLanes / 2>(v));
  if constexpr (kLanes > 4) v = join(v, rotate<4>(v));
  v = join(v, rotate<2>(v));
  v = join(v, rotate<1>(v));
  return v[0];
}

XLLM_INLINE float sum(const Group& g) {
  return reduce(g, [](Vec a, Vec b) { return a + b; });
}

XLLM_INLINE float largest(const Group& g) { return reduce(g, larger); }

/// e^x to 2 units in the last place; 0 below -87, e^88 above 88.
/// Range reduction by ln 2 in two parts (Cody and Waite), then the Cephes polynomial of degree 5.
XLLM_INLINE Vec exponential(Vec x) {
  const Vec capped = x > splat(88.0f) ? splat(88.0f) : x;
  const Vec clamped = larger(capped, splat(-87.0f));
  const Vec magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
  const Vec n = (fma(clamped, splat(1.44269504088896341f), magic)) - magic;
  Vec r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  const IntVec exponent = __builtin_convertvector(n, IntVec) + 127;
  const Vec scaled = p * (Vec)(exponent << 23);
  return x < splat(-87.0f) ? Vec{} : scaled;
}

/// Run `body(i, count)` over groups of a row of `n`: count is 16 but for the last group.
template <class Body>
XLLM_INLINE void for_groups(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) body(i, kGroup);
  if (i < n) body(i, static_cast<int>(n - i));
}

/// As load_group, but reads only `count` elements; the other lanes are zero.
template <class T>
XLLM_INLINE Group load_some(const T* p, int count) {
  if (count == kGroup) return load_group(p);
  T padded[kGroup] = {};
  std::memcpy(padded, p, static_cast<size_t>(count) * sizeof(T));
  return load_group(padded);
}

template <class T>
XLLM_INLINE void store_some(T* p, const Group& g, int count) {
  if (count == kGroup) return store_group(p, g);
  T padded[kGroup];
  store_group(padded, g);
  std::memcpy(p, padded, static_cast<size_t>(count) * sizeof(T));
}

}  // namespace xllm::XLLM_LEVEL
