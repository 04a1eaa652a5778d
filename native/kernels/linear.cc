// Matrix products over packed weights.
#include <omp.h>

#include "tile.h"

namespace xllm::XLLM_LEVEL {
namespace {

constexpr int64_t kAhead = 64;  // k steps between a prefetch and the use of a weight
constexpr int64_t kChunkFloats = 64 * 1024;  // of x: a chunk of rows stays in the second-level cache

/// x as f32 rows of `depth`: itself, or its copy in scratch.
const float* rows_as_f32(const LinearArgs& a) {
  if (a.dtype == Dtype::f32) return static_cast<const float*>(a.x);
  const Bf16* x = static_cast<const Bf16*>(a.x);
#pragma omp parallel for schedule(static) if (a.rows > 16)
  for (int64_t r = 0; r < a.rows; ++r)
    for_groups(a.depth, [&](int64_t k, int count) {
      store_some(a.scratch + r * a.depth + k, load_some(x + r * a.depth + k, count), count);
    });
  return a.scratch;
}

template <class Weight, class Out>
void panel_times_rows(const LinearArgs& a, const float* x, int64_t panel, int64_t first, int64_t num_rows) {
  const Weight* weight = static_cast<const Weight*>(a.weight) + panel * a.depth * kGroup;
  const int64_t column = panel * kGroup;
  const int count = a.columns - column < kGroup ? static_cast<int>(a.columns - column) : kGroup;
  Out* out = static_cast<Out*>(a.out) + column;
  const Group bias = a.bias ? load_some(a.bias + column, count) : Group{};
  for_tiles(num_rows, [&](int64_t offset, int rows) {
    // The first tile brings the panel into the cache, a little ahead of itself; the last one fetches the next panel.
    const int64_t ahead = offset == 0 ? kAhead * kGroup : offset + rows == num_rows ? a.depth * kGroup : 0;
    with_rows(rows, [&]<int R>(Rows<R> n) {
      Group acc[R] = {};
      const int64_t row = first + offset;
      const auto columns = [&](int64_t k) {
        __builtin_prefetch(weight + k * kGroup + ahead);
        return weight + k * kGroup;
      };
      accumulate(n, x + row * a.depth, a.depth, a.depth, columns, acc);
      for (int r = 0; r < R; ++r) {
        if (a.bias)
          for (int i = 0; i < kParts; ++i) acc[r].part[i] += bias.part[i];
        store_some(out + (row + r) * a.columns, acc[r], count);
      }
    });
  });
}

template <class Weight, class Out>
void multiply(const LinearArgs& a) {
  const float* x = rows_as_f32(a);
  const int64_t panels = (a.columns + kGroup - 1) / kGroup;
  int64_t chunk = kChunkFloats / a.depth;
  chunk = chunk < kTileRows ? kTileRows : chunk;
  const int64_t chunks = (a.rows + chunk - 1) / chunk;
  // Small pieces, handed out as threads get free: other processes share the cores.
  const int64_t grain = chunks * panels / (8 * omp_get_max_threads()) + 1;
#pragma omp parallel for collapse(2) schedule(dynamic, grain) if (a.rows * a.columns * a.depth >= kParallelProducts)
  for (int64_t c = 0; c < chunks; ++c)
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t first = c * a.rows / chunks;
      panel_times_rows<Weight, Out>(a, x, panel, first, (c + 1) * a.rows / chunks - first);
    }
}

template <class T>
void copy_rows(const EmbeddingArgs& a) {
  const T* weight = static_cast<const T*>(a.weight);
  T* out = static_cast<T*>(a.out);
#pragma omp parallel for schedule(static) if (a.rows > 8)
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t id = a.token_ids[r];
    const T* column = weight + id / kGroup * a.width * kGroup + id % kGroup;
    for (int64_t i = 0; i < a.width; ++i) out[r * a.width + i] = column[i * kGroup];
  }
}

}  // namespace

int64_t linear_scratch(const LinearArgs& a) { return a.dtype == Dtype::f32 ? 0 : a.rows * a.depth; }

void linear(const LinearArgs& a) {
  if (a.dtype == Dtype::f32)
    multiply<float, float>(a);
  else if (a.out_dtype == Dtype::f32)
    multiply<Bf16, float>(a);
  else
    multiply<Bf16, Bf16>(a);
}

void embedding(const EmbeddingArgs& a) {
  if (a.dtype == Dtype::f32)
    copy_rows<float>(a);
  else
    copy_rows<Bf16>(a);
}

}  // namespace xllm::XLLM_LEVEL
