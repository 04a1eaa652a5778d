// Matrix products over packed weights.
#include <omp.h>

#include "tile.h"

namespace xllm::XLLM_LEVEL {
namespace {

constexpr int64_t kAhead = 64;  // k steps between a prefetch and the use of a weight
constexpr int64_t kChunkFloats = 64 * 1024;  // of x: a chunk of rows stays in the second-level cache

template <class Weight>
void panel_times_rows(const LinearArgs& a, int64_t panel, int64_t first, int64_t num_rows) {
  const Weight* weight = static_cast<const Weight*>(a.weight) + panel * a.depth * kGroup;
  const int64_t column = panel * kGroup;
  const int count = a.columns - column < kGroup ? static_cast<int>(a.columns - column) : kGroup;
  float* out = a.out + column;
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
      accumulate(n, a.x + row * a.depth, a.depth, a.depth, columns, acc);
      for (int r = 0; r < R; ++r) {
        if (a.bias)
          for (int i = 0; i < kParts; ++i) acc[r].part[i] += bias.part[i];
        store_some(out + (row + r) * a.columns, acc[r], count);
      }
    });
  });
}

template <class Weight>
void multiply(const LinearArgs& a) {
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
      panel_times_rows<Weight>(a, panel, first, (c + 1) * a.rows / chunks - first);
    }
}

template <class T>
void copy_rows(const EmbeddingArgs& a) {
  const T* weight = static_cast<const T*>(a.weight);
#pragma omp parallel for schedule(static) if (a.rows > 8)
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t id = a.token_ids[r];
    const T* column = weight + id / kGroup * a.width * kGroup + id % kGroup;
    for (int64_t i = 0; i < a.width; ++i) a.out[r * a.width + i] = to_float(column[i * kGroup]);
  }
}

}  // namespace

void linear(const LinearArgs& a) { a.dtype == Dtype::f32 ? multiply<float>(a) : multiply<Bf16>(a); }

void embedding(const EmbeddingArgs& a) { a.dtype == Dtype::f32 ? copy_rows<float>(a) : copy_rows<Bf16>(a); }

}  // namespace xllm::XLLM_LEVEL
