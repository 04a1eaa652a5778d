// Operators on rows: norms, rotary positions, SiLU, and the write into the paged cache.
#include <omp.h>

#include "simd.h"

namespace xllm::XLLM_LEVEL {
namespace {

constexpr int64_t kParallel = 1 << 15;  // elements from which a second thread pays

XLLM_INLINE Group add(const Group& a, const Group& b) {
  Group c;
  for (int i = 0; i < kParts; ++i) c.part[i] = a.part[i] + b.part[i];
  return c;
}

XLLM_INLINE Group multiply(const Group& a, const Group& b) {
  Group c;
  for (int i = 0; i < kParts; ++i) c.part[i] = a.part[i] * b.part[i];
  return c;
}

void norm_row(const NormArgs& a, int64_t row) {
  const float* x = a.x + row * a.width;
  float* residual = a.residual ? a.residual + row * a.width : nullptr;
  float* out = a.out + row * a.width;
  Group squares = {};
  for_groups(a.width, [&](int64_t i, int count) {
    Group v = load_some(x + i, count);
    if (residual) {
      v = add(load_some(residual + i, count), v);
      store_some(residual + i, v, count);
    }
    for (int p = 0; p < kParts; ++p) squares.part[p] = fma(v.part[p], v.part[p], squares.part[p]);
  });
  const float* source = residual ? residual : x;
  const float mean = sum(squares) / static_cast<float>(a.width);
  const Vec scale = splat(1.0f / __builtin_sqrtf(mean + a.epsilon));
  for_groups(a.width, [&](int64_t i, int count) {
    Group v = load_some(source + i, count);
    for (int p = 0; p < kParts; ++p) v.part[p] *= scale;
    store_some(out + i, multiply(load_some(a.weight + i, count), v), count);
  });
}

void rope_row(const RopeArgs& a, int64_t row) {
  const int64_t half = a.head_dim / 2;
  const float* cosine = a.table + a.positions[row] * a.head_dim;
  const float* sine = cosine + half;
  for (int64_t head = 0; head < a.heads; ++head) {
    float* low = a.x + row * a.stride + head * a.head_dim;
    float* high = low + half;
    for_groups(half, [&](int64_t i, int count) {
      const Group c = load_some(cosine + i, count), s = load_some(sine + i, count);
      const Group x = load_some(low + i, count), y = load_some(high + i, count);
      Group turned_low, turned_high;
      for (int p = 0; p < kParts; ++p) {
        turned_low.part[p] = x.part[p] * c.part[p] - y.part[p] * s.part[p];
        turned_high.part[p] = y.part[p] * c.part[p] + x.part[p] * s.part[p];
      }
      store_some(low + i, turned_low, count);
      store_some(high + i, turned_high, count);
    });
  }
}

void silu_mul_row(const SiluMulArgs& a, int64_t row) {
  const float* gate = a.x + row * 2 * a.width;
  const float* up = gate + a.width;
  float* out = a.out + row * a.width;
  for_groups(a.width, [&](int64_t i, int count) {
    Group g = load_some(gate + i, count);
    for (int p = 0; p < kParts; ++p) {
      const Vec v = g.part[p];
      const Vec tail = exponential(v > Vec{} ? -v : v);  // e^-|v|: the sigmoid of v is 1 or tail over 1 + tail
      g.part[p] = v * ((v > Vec{} ? splat(1.0f) : tail) / (tail + 1.0f));
    }
    store_some(out + i, multiply(g, load_some(up + i, count)), count);
  });
}

template <class T>
void write_kv_row(const WriteKvArgs& a, int64_t row) {
  const int64_t block = a.slots[row] / a.block_size, token = a.slots[row] % a.block_size;
  for (int64_t head = 0; head < a.kv_heads; ++head) {
    const int64_t to = block * a.block_stride + (head * a.block_size + token) * a.head_dim;
    const int64_t from = row * a.stride + head * a.head_dim;
    T *k = static_cast<T*>(a.k) + to, *v = static_cast<T*>(a.v) + to;
    for_groups(a.head_dim, [&](int64_t i, int count) {
      store_some(k + i, load_some(a.keys + from + i, count), count);
      store_some(v + i, load_some(a.values + from + i, count), count);
    });
  }
}

}  // namespace

void norm(const NormArgs& a) {
#pragma omp parallel for schedule(static) if (a.rows > 1 && a.rows * a.width > kParallel)
  for (int64_t row = 0; row < a.rows; ++row) norm_row(a, row);
}

void rope(const RopeArgs& a) {
#pragma omp parallel for schedule(static) if (a.rows > 1 && a.rows * a.heads * a.head_dim > kParallel)
  for (int64_t row = 0; row < a.rows; ++row) rope_row(a, row);
}

void silu_mul(const SiluMulArgs& a) {
#pragma omp parallel for schedule(static) if (a.rows > 1 && a.rows * a.width > kParallel / 2)
  for (int64_t row = 0; row < a.rows; ++row) silu_mul_row(a, row);
}

void write_kv(const WriteKvArgs& a) {
#pragma omp parallel for schedule(static) if (a.rows > 1 && a.rows * a.kv_heads * a.head_dim > kParallel)
  for (int64_t row = 0; row < a.rows; ++row)
    a.dtype == Dtype::f32 ? write_kv_row<float>(a, row) : write_kv_row<Bf16>(a, row);
}

}  // namespace xllm::XLLM_LEVEL
