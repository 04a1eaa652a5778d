// The register tile shared by linear and attention: a few rows by sixteen columns, accumulated over k in order.
#pragma once

#include "simd.h"

namespace xllm::XLLM_LEVEL {

#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 2;
#endif

/// Multiplications from which more than one thread pays.
constexpr int64_t kParallelProducts = 1 << 17;

template <int R>
struct Rows {};

/// Call `body(Rows<R>{})` with R = rows, 1 ≤ rows ≤ kTileRows.
template <int R = kTileRows, class Body>
XLLM_INLINE void with_rows(int rows, Body body) {
  if constexpr (R == 1) {
    body(Rows<1>{});
  } else {
    if (rows == R)
      body(Rows<R>{});
    else
      with_rows<R - 1>(rows, body);
  }
}

/// Call `body(first, rows)` for consecutive pieces of [0, n) of nearly equal size, none above kTileRows.
template <class Body>
XLLM_INLINE void for_tiles(int64_t n, Body body) {
  const int64_t pieces = (n + kTileRows - 1) / kTileRows;
  int64_t first = 0;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t rows = n / pieces + (i < n % pieces ? 1 : 0);
    body(first, static_cast<int>(rows));
    first += rows;
  }
}

/// acc[r] += Σ_k x[r · stride + k] · columns(k)[0 … 15], k in order. The chain of one element knows only its own row.
template <int R, class Columns>
XLLM_INLINE void accumulate(Rows<R>, const float* x, int64_t stride, int64_t depth, Columns columns, Group* acc) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    const Group w = load_group(columns(k));
    for (int r = 0; r < R; ++r) {
      const Vec factor = splat(x[r * stride + k]);
      for (int i = 0; i < kParts; ++i) acc[r].part[i] = fma(factor, w.part[i], acc[r].part[i]);
    }
  }
}

}  // namespace xllm::XLLM_LEVEL
