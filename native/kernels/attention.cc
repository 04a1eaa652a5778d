// Attention over paged keys and values: one routine for decode and prefill.
//
//   positions    0        32        64                128                          256
//   tiles        |---------|---------|--------|--------|--- … ----------------------|      32 tokens, at absolute positions
//   splits       |-------------------------------------|--------------------- … ----|      128 tokens: an online softmax each
//
// A split's (maximum, sum, weighted values) is computed on its own and the splits are merged from the first to the last.
// So a row's result is a function of its query and its KV alone: splits may run on different threads, and other rows may
// share the tile, without changing a bit. What lies beyond a row's own position is neither multiplied nor added.
//
// A unit of work is a block of query tokens and one kv head: its rows are (token, head of the group), so that keys and
// values are read once for all of them.
#include <omp.h>

#include "tile.h"

namespace xllm::XLLM_LEVEL {
namespace {

constexpr int64_t kTile = 32;
constexpr int64_t kSplit = 128;
constexpr int64_t kMaxRows = 32;
constexpr float kLowest = -3.0e38f;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Query tokens of one unit.
int64_t block_tokens(const AttentionArgs& a) { return kMaxRows / (a.heads / a.kv_heads); }

/// The rows of a unit: `num_tokens` query tokens from row `first` of q; token i sees `visible + i` tokens of KV.
struct Unit {
  int64_t request, kv_head, first, num_tokens, visible, rows;
};

/// An online softmax over some tokens, for each row of a unit.
struct State {
  float* maximum;  // [kMaxRows]
  float* total;    // [kMaxRows]
  float* values;   // [kMaxRows][head_dim]
};

int64_t state_floats(const AttentionArgs& a) { return kMaxRows * (a.head_dim + 2); }

State state_at(float* memory) {
  return {memory, memory + kMaxRows, memory + 2 * kMaxRows};
}

/// What a thread needs for one unit.
struct Workspace {
  float* query;   // [kMaxRows][head_dim], scaled
  float* keys;    // [head_dim][kTile], transposed
  float* scores;  // [kMaxRows][kTile]
  State part, whole;
};

int64_t workspace_floats(const AttentionArgs& a) {
  return kMaxRows * a.head_dim + a.head_dim * kTile + kMaxRows * kTile + 2 * state_floats(a);
}

Workspace workspace_at(const AttentionArgs& a, float* memory) {
  Workspace w;
  w.query = memory;
  w.keys = w.query + kMaxRows * a.head_dim;
  w.scores = w.keys + a.head_dim * kTile;
  float* states = w.scores + kMaxRows * kTile;
  w.part = state_at(states);
  w.whole = state_at(states + state_floats(a));
  return w;
}

/// Row r of a unit sees the KV positions [0, limit).
int64_t limit_of(const AttentionArgs& a, const Unit& u, int64_t r) { return u.visible + r / (a.heads / a.kv_heads); }

template <class T>
void load_query(const AttentionArgs& a, const Unit& u, float* query) {
  const int64_t group = a.heads / a.kv_heads;
  const Vec scale = splat(a.scale);
  for (int64_t r = 0; r < u.rows; ++r) {
    const T* q = static_cast<const T*>(a.q) + (u.first + r / group) * a.q_stride +
                 (u.kv_head * group + r % group) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += kLanes) store(query + r * a.head_dim + d, load(q + d) * scale);
  }
}

/// Addresses of the tokens [start, start + count) of a sequence in k (or v).
template <class T>
void token_rows(const AttentionArgs& a, const Unit& u, const void* base, int64_t start, int64_t count, const T** rows) {
  const int32_t* table = a.block_tables + u.request * a.max_blocks;
  int64_t block = start / a.block_size, offset = start % a.block_size;
  for (int64_t t = 0; t < count;) {
    const T* head = static_cast<const T*>(base) + table[block] * a.block_stride + u.kv_head * a.block_size * a.head_dim;
    for (; offset < a.block_size && t < count; ++offset, ++t) rows[t] = head + offset * a.head_dim;
    ++block;
    offset = 0;
  }
}

/// keys[d][t] = k of token t; columns from `count` on are zero.
template <class T>
void transpose_keys(const T* const* rows, int64_t count, int64_t head_dim, float* keys) {
  for (int64_t t = 0; t < count; ++t)
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const Vec k = load(rows[t] + d);
      for (int i = 0; i < kLanes; ++i) keys[(d + i) * kTile + t] = k[i];
    }
  for (int64_t t = count; t < kTile; ++t)
    for (int64_t d = 0; d < head_dim; ++d) keys[d * kTile + t] = 0.0f;
}

void score_tile(const AttentionArgs& a, const Unit& u, const Workspace& w) {
  for (int64_t column = 0; column < kTile; column += kGroup)
    for_tiles(u.rows, [&](int64_t first, int rows) {
      with_rows(rows, [&]<int R>(Rows<R> n) {
        Group acc[R] = {};
        const float* keys = w.keys + column;
        accumulate(n, w.query + first * a.head_dim, a.head_dim, a.head_dim, [&](int64_t d) { return keys + d * kTile; },
                   acc);
        for (int r = 0; r < R; ++r) store_group(w.scores + (first + r) * kTile + column, acc[r]);
      });
    });
}

/// One row of the online softmax: scores of the first `valid` tokens become weights, the rest zeros.
void softmax_row(const AttentionArgs& a, int64_t valid, float* scores, int64_t r, const State& s) {
  Group best = splat_group(kLowest);
  IntVec index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  const int32_t limit = static_cast<int32_t>(valid);
  for (int64_t t = 0; t < kTile; t += kLanes) {
    Vec& lane = best.part[t / kLanes % kParts];
    const Vec score = index + static_cast<int32_t>(t) < limit ? load(scores + t) : splat(kLowest);
    store(scores + t, score);
    lane = larger(lane, score);
  }
  const float before = s.maximum[r];
  float maximum = largest(best);
  maximum = maximum > before ? maximum : before;
  Group total = {};
  for (int64_t t = 0; t < kTile; t += kLanes) {
    const Vec weight = exponential(load(scores + t) - splat(maximum));
    const Vec kept = index + static_cast<int32_t>(t) < limit ? weight : Vec{};
    store(scores + t, kept);
    total.part[t / kLanes % kParts] += kept;
  }
  if (maximum > before) {
    const Vec shrink = exponential(splat(before) - splat(maximum));
    s.maximum[r] = maximum;
    s.total[r] *= shrink[0];
    float* values = s.values + r * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += kLanes) store(values + d, load(values + d) * shrink);
  }
  s.total[r] += sum(total);
}

/// values[first … first + rows) += weights · v of the tokens [from, to).
template <class T>
void add_values(const AttentionArgs& a, const T* const* v, const float* scores, float* values, int rows, int64_t from,
                int64_t to) {
  for (int64_t d = 0; d < a.head_dim; d += kGroup)
    with_rows(rows, [&]<int R>(Rows<R> n) {
      Group acc[R];
      for (int r = 0; r < R; ++r) acc[r] = load_group(values + r * a.head_dim + d);
      accumulate(n, scores + from, kTile, to - from, [&](int64_t t) { return v[from + t] + d; }, acc);
      for (int r = 0; r < R; ++r) store_group(values + r * a.head_dim + d, acc[r]);
    });
}

template <class T>
void weigh_tile(const AttentionArgs& a, const Unit& u, const Workspace& w, int64_t start, const T* const* v) {
  const auto valid = [&](int64_t r) {
    const int64_t n = limit_of(a, u, r) - start;
    return n < 0 ? int64_t{0} : n < kTile ? n : kTile;
  };
  for (int64_t r = 0; r < u.rows; ++r)
    if (valid(r) > 0) softmax_row(a, valid(r), w.scores + r * kTile, r, w.part);
  for_tiles(u.rows, [&](int64_t first, int rows) {
    const float* scores = w.scores + first * kTile;
    float* values = w.part.values + first * a.head_dim;
    const int64_t common = valid(first);  // rows see more, the later they are
    if (common > 0) add_values(a, v, scores, values, rows, 0, common);
    for (int r = 1; r < rows; ++r)
      if (valid(first + r) > common)
        add_values(a, v, scores + r * kTile, values + r * a.head_dim, 1, common, valid(first + r));
  });
}

void clear(const AttentionArgs& a, const Unit& u, const State& s) {
  for (int64_t r = 0; r < u.rows; ++r) {
    s.maximum[r] = kLowest;
    s.total[r] = 0.0f;
  }
  std::memset(s.values, 0, static_cast<size_t>(u.rows * a.head_dim) * sizeof(float));
}

/// The softmax of one split into w.part.
template <class T>
void attend_split(const AttentionArgs& a, const Unit& u, int64_t split, const Workspace& w) {
  clear(a, u, w.part);
  const int64_t last = limit_of(a, u, u.rows - 1);
  const int64_t end = (split + 1) * kSplit < last ? (split + 1) * kSplit : last;
  for (int64_t start = split * kSplit; start < end; start += kTile) {
    const int64_t count = end - start < kTile ? end - start : kTile;
    const T* k[kTile];
    const T* v[kTile];
    token_rows(a, u, a.k, start, count, k);
    token_rows(a, u, a.v, start, count, v);
    transpose_keys(k, count, a.head_dim, w.keys);
    score_tile(a, u, w);
    weigh_tile(a, u, w, start, v);
  }
}

/// whole := whole and the next split together.
void merge(const AttentionArgs& a, const Unit& u, const State& whole, const State& part) {
  for (int64_t r = 0; r < u.rows; ++r) {
    if (part.total[r] == 0.0f) continue;
    const float maximum = part.maximum[r] > whole.maximum[r] ? part.maximum[r] : whole.maximum[r];
    const Vec old_scale = exponential(splat(whole.maximum[r]) - splat(maximum));
    const Vec new_scale = exponential(splat(part.maximum[r]) - splat(maximum));
    whole.maximum[r] = maximum;
    whole.total[r] = whole.total[r] * old_scale[0] + part.total[r] * new_scale[0];
    float* sums = whole.values + r * a.head_dim;
    const float* more = part.values + r * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += kLanes)
      store(sums + d, load(sums + d) * old_scale + load(more + d) * new_scale);
  }
}

template <class T>
void write_out(const AttentionArgs& a, const Unit& u, const State& s) {
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t r = 0; r < u.rows; ++r) {
    T* out = static_cast<T*>(a.out) + ((u.first + r / group) * a.heads + u.kv_head * group + r % group) * a.head_dim;
    const Vec total = splat(s.total[r]);
    for (int64_t d = 0; d < a.head_dim; d += kLanes) store(out + d, load(s.values + r * a.head_dim + d) / total);
  }
}

int64_t count_blocks(const AttentionArgs& a) {
  int64_t blocks = 0;
  for (int64_t i = 0; i < a.requests; ++i)
    blocks += ceil_div(a.query_starts[i + 1] - a.query_starts[i], block_tokens(a));
  return blocks;
}

/// Query blocks as (request, first row) pairs; the unit of a block and a kv head.
void list_blocks(const AttentionArgs& a, int32_t* blocks) {
  for (int32_t i = 0; i < a.requests; ++i)
    for (int32_t row = a.query_starts[i]; row < a.query_starts[i + 1]; row += static_cast<int32_t>(block_tokens(a))) {
      *blocks++ = i;
      *blocks++ = row;
    }
}

Unit unit_of(const AttentionArgs& a, const int32_t* block, int64_t kv_head) {
  Unit u;
  u.request = block[0];
  u.first = block[1];
  u.kv_head = kv_head;
  const int64_t end = a.query_starts[u.request + 1];
  u.num_tokens = end - u.first < block_tokens(a) ? end - u.first : block_tokens(a);
  u.visible = a.context_lens[u.request] - (end - u.first) + 1;
  u.rows = u.num_tokens * (a.heads / a.kv_heads);
  return u;
}

int64_t num_splits(const AttentionArgs& a, const Unit& u) { return ceil_div(limit_of(a, u, u.rows - 1), kSplit); }

template <class T>
void attend(const AttentionArgs& a) {
  const int64_t blocks = count_blocks(a);
  int32_t* block_list = reinterpret_cast<int32_t*>(a.scratch);
  list_blocks(a, block_list);
  float* workspaces = a.scratch + ceil_div(2 * blocks, kGroup) * kGroup;
#pragma omp parallel
  {
    const Workspace w = workspace_at(a, workspaces + omp_get_thread_num() * workspace_floats(a));
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
        const Unit u = unit_of(a, block_list + 2 * block, kv_head);
        load_query<T>(a, u, w.query);
        clear(a, u, w.whole);
        for (int64_t split = 0; split < num_splits(a, u); ++split) {
          attend_split<T>(a, u, split, w);
          merge(a, u, w.whole, w.part);
        }
        write_out<T>(a, u, w.whole);
      }
  }
}

}  // namespace

int64_t attention_scratch(const AttentionArgs& a) {
  return ceil_div(2 * count_blocks(a), kGroup) * kGroup + omp_get_max_threads() * workspace_floats(a);
}

void attention(const AttentionArgs& a) {
  if (a.dtype == Dtype::f32)
    attend<float>(a);
  else
    attend<Bf16>(a);
}

}  // namespace xllm::XLLM_LEVEL
