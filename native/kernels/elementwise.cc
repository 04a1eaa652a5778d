// Operators on rows: norms, rotary positions, gates, and the write into the paged cache.
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

/// out = RMS norm of x (or of residual + x, which is written back), times weight. out may be x.
XLLM_INLINE void norm_row(const float* x, float* residual, const float* weight, float* out, int64_t width,
                          float epsilon) {
  Group squares = {};
  for_groups(width, [&](int64_t i, int count) {
    Group v = load_some(x + i, count);
    if (residual) {
      v = add(load_some(residual + i, count), v);
      store_some(residual + i, v, count);
    }
    for (int p = 0; p < kParts; ++p) squares.part[p] = fma(v.part[p], v.part[p], squares.part[p]);
  });
  const float* source = residual ? residual : x;
  const float mean = sum(squares) / static_cast<float>(width);
  const Vec scale = splat(1.0f / __builtin_sqrtf(mean + epsilon));
  for_groups(width, [&](int64_t i, int count) {
    Group v = load_some(source + i, count);
    for (int p = 0; p < kParts; ++p) v.part[p] *= scale;
    store_some(out + i, multiply(load_some(weight + i, count), v), count);
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

/// v · σ(s), where σ(s) is 1 or e^-|s| over 1 + e^-|s|.
XLLM_INLINE Vec times_sigmoid(Vec v, Vec s) {
  const Vec tail = exponential(s > Vec{} ? -s : s);
  return v * ((s > Vec{} ? splat(1.0f) : tail) / (tail + 1.0f));
}

struct Silu {
  XLLM_INLINE static Vec of(Vec v) { return times_sigmoid(v, v); }
};

/// v / 2 · (1 + tanh(√(2/π) · (v + 0.044715 · v³))), and (1 + tanh s) / 2 = σ(2 · s).
struct Gelu {
  XLLM_INLINE static Vec of(Vec v) {
    return times_sigmoid(v, v * fma(v * v, splat(0.0713548162726f), splat(1.5957691216057f)));
  }
};

template <class Function>
void gated_mul_row(const GatedMulArgs& a, int64_t row) {
  const float* gate = a.x + row * 2 * a.width;
  const float* up = gate + a.width;
  float* out = a.out + row * a.width;
  for_groups(a.width, [&](int64_t i, int count) {
    Group g = load_some(gate + i, count);
    for (int p = 0; p < kParts; ++p) g.part[p] = Function::of(g.part[p]);
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
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t first = row * a.width;
    norm_row(a.x + first, a.residual ? a.residual + first : nullptr, a.weight, a.out + first, a.width, a.epsilon);
  }
}

void head_norm(const HeadNormArgs& a) {
  const int64_t heads = a.heads + a.kv_heads;
#pragma omp parallel for schedule(static) if (a.rows > 1 && a.rows * heads * a.head_dim > kParallel)
  for (int64_t row = 0; row < a.rows; ++row)
    for (int64_t head = 0; head < heads; ++head) {
      float* x = a.x + row * a.stride + head * a.head_dim;
      norm_row(x, nullptr, head < a.heads ? a.q_weight : a.k_weight, x, a.head_dim, a.epsilon);
    }
}

void rope(const RopeArgs& a) {
#pragma omp parallel for schedule(static) if (a.rows > 1 && a.rows * a.heads * a.head_dim > kParallel)
  for (int64_t row = 0; row < a.rows; ++row) rope_row(a, row);
}

void gated_mul(const GatedMulArgs& a) {
#pragma omp parallel for schedule(static) if (a.rows > 1 && a.rows * a.width > kParallel / 2)
  for (int64_t row = 0; row < a.rows; ++row)
    a.gate == Gate::silu ? gated_mul_row<Silu>(a, row) : gated_mul_row<Gelu>(a, row);
}

void write_kv(const WriteKvArgs& a) {
#pragma omp parallel for schedule(static) if (a.rows > 1 && a.rows * a.kv_heads * a.head_dim > kParallel)
  for (int64_t row = 0; row < a.rows; ++row)
    a.dtype == Dtype::f32 ? write_kv_row<float>(a, row) : write_kv_row<Bf16>(a, row);
}

}  // namespace xllm::XLLM_LEVEL
