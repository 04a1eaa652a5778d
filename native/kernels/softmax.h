// Attention of a few query rows over one split of a sequence's paged KV: tiles of keys transposed for the register tile,
// and an online softmax.
#pragma once

#include "tile.h"

namespace xllm::XLLM_LEVEL {

constexpr int64_t kTile = 32;     // tokens whose keys and values are taken together
constexpr int64_t kSplit = 128;   // tokens of one online softmax
constexpr int64_t kMaxRows = 32;  // query rows of a unit
constexpr int64_t kMaxHeadDim = 256;
constexpr float kLowest = -3.0e38f;

/// A block of query tokens and one kv head. Its rows are (token, head of the group): keys and values are read once for
/// all of them. Token i sees KV positions before visible + i.
struct Unit {
  int64_t request, kv_head, first, visible, rows;
};

/// An online softmax over some tokens, for each row of a unit.
struct State {
  float* maximum;  // [rows]
  float* total;    // [rows]
  float* values;   // [rows][head_dim]
};

XLLM_INLINE int64_t state_floats(const AttentionArgs& a, int64_t rows) { return rows * (a.head_dim + 2); }

XLLM_INLINE State state_at(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }

/// What a thread needs beside the state.
struct Workspace {
  float* query;   // [kMaxRows][head_dim], scaled
  float* keys;    // [head_dim][kTile], transposed
  float* scores;  // [kMaxRows][kTile]
};

XLLM_INLINE int64_t workspace_floats(const AttentionArgs& a) {
  return kMaxRows * a.head_dim + a.head_dim * kTile + kMaxRows * kTile;
}

XLLM_INLINE Workspace workspace_at(const AttentionArgs& a, float* memory) {
  float* keys = memory + kMaxRows * a.head_dim;
  return {memory, keys, keys + a.head_dim * kTile};
}

XLLM_INLINE int64_t group_size(const AttentionArgs& a) { return a.heads / a.kv_heads; }

/// The first position a token sees whose last one is limit - 1.
XLLM_INLINE int64_t first_seen(const AttentionArgs& a, int64_t limit) {
  return a.window > 0 && limit > a.window ? limit - a.window : 0;
}

/// Row r sees the KV positions [first_seen(limit), limit).
XLLM_INLINE int64_t limit_of(const AttentionArgs& a, const Unit& u, int64_t r) { return u.visible + r / group_size(a); }

inline void load_query(const AttentionArgs& a, const Unit& u, float* query) {
  const int64_t group = group_size(a);
  const Vec scale = splat(a.scale);
  for (int64_t r = 0; r < u.rows; ++r) {
    const float* q = a.q + (u.first + r / group) * a.q_stride +
                 (u.kv_head * group + r % group) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += kLanes) store(query + r * a.head_dim + d, load(q + d) * scale);
  }
}

/// Addresses of the tokens [start, start + count) of a sequence in k (or v); the rest of `rows` points to zeros.
template <class T>
void token_rows(const AttentionArgs& a, const Unit& u, const void* base, int64_t start, int64_t count, const T** rows) {
  static const T zeros[kMaxHeadDim] = {};
  const int32_t* table = a.block_tables + u.request * a.max_blocks;
  int64_t block = start / a.block_size, offset = start % a.block_size, t = 0;
  while (t < count) {
    const T* head = static_cast<const T*>(base) + table[block] * a.block_stride + u.kv_head * a.block_size * a.head_dim;
    for (; offset < a.block_size && t < count; ++offset, ++t) rows[t] = head + offset * a.head_dim;
    ++block;
    offset = 0;
  }
  for (; t < kTile; ++t) rows[t] = zeros;
}

typedef uint32_t Octet __attribute__((vector_size(32)));

#if defined(__clang__)
#define XLLM_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // __builtin_shufflevector came with GCC 12 only
#define XLLM_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Octet{__VA_ARGS__})
#endif

/// Eight by eight 32-bit elements, transposed: pairs, then pairs of pairs, then halves.
XLLM_INLINE void transpose(Octet* r) {
  Octet s[8];
  for (int i = 0; i < 8; i += 2) {
    s[i] = XLLM_SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    s[i + 1] = XLLM_SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = XLLM_SHUFFLE(s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2 * j + 1] = XLLM_SHUFFLE(s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    s[i] = XLLM_SHUFFLE(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    s[i + 4] = XLLM_SHUFFLE(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  for (int i = 0; i < 8; ++i) r[i] = s[i];
}

#undef XLLM_SHUFFLE

XLLM_INLINE void store_dims(const float*, const Octet* r, float* keys) {
  for (int i = 0; i < 8; ++i) std::memcpy(keys + i * kTile, &r[i], sizeof r[i]);
}

/// Each element is a pair of dimensions.
XLLM_INLINE void store_dims(const Bf16*, const Octet* r, float* keys) {
  for (int i = 0; i < 8; ++i) {
    const Octet even = r[i] << 16, odd = r[i] & 0xffff0000u;
    std::memcpy(keys + 2 * i * kTile, &even, sizeof even);
    std::memcpy(keys + (2 * i + 1) * kTile, &odd, sizeof odd);
  }
}

/// keys[d][t] = k of token t, eight tokens and 32 bytes of each at a time.
template <class T>
void transpose_keys(const T* const* rows, int64_t head_dim, float* keys) {
  constexpr int64_t kDims = 32 / sizeof(T);
  for (int64_t t = 0; t < kTile; t += 8)
    for (int64_t d = 0; d < head_dim; d += kDims) {
      Octet r[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&r[i], rows[t + i] + d, sizeof r[i]);
      transpose(r);
      store_dims(rows[0], r, keys + d * kTile + t);
    }
}

/// The keys and values of one tile.
template <class T>
struct Tile {
  const T* k[kTile];
  const T* v[kTile];
  int64_t start, count;
};

/// Find the tile at `start` of a context that ends at `end`; beyond the end its count is not positive.
template <class T>
void find_tile(const AttentionArgs& a, const Unit& u, int64_t start, int64_t end, Tile<T>& tile) {
  tile.start = start;
  tile.count = end - start < kTile ? end - start : kTile;
  if (tile.count <= 0) return;
  token_rows(a, u, a.k, start, tile.count, tile.k);
  token_rows(a, u, a.v, start, tile.count, tile.v);
}

/// w.scores = queries · keys. Meanwhile the next tile's keys, then its values, are asked from memory, evenly over the
/// products: all at once they would fill the processor's miss buffers and stall it. (Half a tile at least is contiguous.)
template <class T>
void score_tile(const AttentionArgs& a, const Unit& u, const Workspace& w, const Tile<T>& next) {
  for (int64_t column = 0; column < kTile; column += kGroup) {
    const T* const* rows = column == 0 ? next.k : next.v;
    const bool fetch = next.count > 0;
    const T* lower = fetch ? rows[0] : static_cast<const T*>(a.k);
    const T* upper = fetch ? rows[kTile / 2] - kTile / 2 * a.head_dim : lower;
    const int64_t step = fetch ? kTile : 0;
    for_tiles(u.rows, [&](int64_t first, int rows) {
      with_rows(rows, [&]<int R>(Rows<R> n) {
        Group acc[R] = {};
        const float* keys = w.keys + column;
        const int64_t half = a.head_dim / 2;
        const auto columns = [&](int64_t d) {
          const T* line = (d < half ? lower : upper) + d * step;
          __builtin_prefetch(line);
          if constexpr (sizeof(T) == 4) __builtin_prefetch(line + kTile / 2);
          return keys + d * kTile;
        };
        accumulate(n, w.query + first * a.head_dim, a.head_dim, a.head_dim, columns, acc);
        for (int r = 0; r < R; ++r) store_group(w.scores + (first + r) * kTile + column, acc[r]);
      });
    });
  }
}

XLLM_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/// Tokens [from, to) of a tile.
struct Span {
  int64_t from, to;
};

/// Those of the tile at position `start` that row r sees.
inline Span span_of(const AttentionArgs& a, const Unit& u, int64_t r, int64_t start) {
  const auto within = [&](int64_t position) {
    const int64_t n = position - start;
    return n < 0 ? int64_t{0} : n < kTile ? n : kTile;
  };
  const int64_t limit = limit_of(a, u, r);
  return {within(first_seen(a, limit)), within(limit)};
}

/// One row of the online softmax: scores of the tokens of `seen` become weights, the rest zeros.
inline void softmax_row(const AttentionArgs& a, Span seen, float* scores, int64_t r, const State& s) {
  IntVec index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  const IntVec from = IntVec{} + static_cast<int32_t>(seen.from), to = IntVec{} + static_cast<int32_t>(seen.to);
  const auto is_seen = [&](int i) { return (index + i * kLanes >= from) & (index + i * kLanes < to); };
  Group best = splat_group(kLowest);
  Vec score[kTile / kLanes];
  for (int i = 0; i < kTile / kLanes; ++i) {
    score[i] = is_seen(i) ? load(scores + i * kLanes) : splat(kLowest);
    best.part[i % kParts] = larger(best.part[i % kParts], score[i]);
  }
  const float before = s.maximum[r], tile_best = largest(best);
  const float maximum = tile_best > before ? tile_best : before;
  Group total = {};
  for (int i = 0; i < kTile / kLanes; ++i) {
    const Vec weight = exponential(score[i] - splat(maximum));
    const Vec kept = is_seen(i) ? weight : Vec{};
    store(scores + i * kLanes, kept);
    total.part[i % kParts] += kept;
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

/// values[0 … rows) += weights · v of the tokens [from, to).
template <class T>
void add_values(const AttentionArgs& a, const T* const* v, const float* weights, float* values, int rows, int64_t from,
                int64_t to) {
  with_rows(rows, [&]<int R>(Rows<R> n) {
    for (int64_t d = 0; d < a.head_dim; d += kGroup) {
      Group acc[R];
      for (int r = 0; r < R; ++r) acc[r] = load_group(values + r * a.head_dim + d);
      accumulate(n, weights + from, kTile, to - from, [&](int64_t t) { return v[from + t] + d; }, acc);
      for (int r = 0; r < R; ++r) store_group(values + r * a.head_dim + d, acc[r]);
    }
  });
}

/// Softmax and values of the tile at position `start`. A row takes the tokens it sees and no other, in their order.
template <class T>
void weigh_tile(const AttentionArgs& a, const Unit& u, const Workspace& w, const State& s, int64_t start,
                const T* const* v) {
  Span spans[kMaxRows];
  for (int64_t r = 0; r < u.rows; ++r) {
    spans[r] = span_of(a, u, r, start);
    if (spans[r].from < spans[r].to) softmax_row(a, spans[r], w.scores + r * kTile, r, s);
  }
  for_tiles(u.rows, [&](int64_t first, int rows) {
    const auto add = [&](int r, int count, int64_t from, int64_t to) {
      if (from < to)
        add_values(a, v, w.scores + (first + r) * kTile, s.values + (first + r) * a.head_dim, count, from, to);
    };
    const Span* seen = spans + first;
    Span common = {seen[rows - 1].from, seen[0].to};  // later rows begin and end no earlier
    if (common.from >= common.to) common = {kTile, kTile};
    for (int r = 0; r < rows; ++r) add(r, 1, seen[r].from, smaller(seen[r].to, common.from));
    add(0, rows, common.from, common.to);
    for (int r = 0; r < rows; ++r) add(r, 1, common.to, seen[r].to);
  });
}

inline void clear(const AttentionArgs& a, const Unit& u, const State& s) {
  for (int64_t r = 0; r < u.rows; ++r) {
    s.maximum[r] = kLowest;
    s.total[r] = 0.0f;
  }
  std::memset(s.values, 0, static_cast<size_t>(u.rows * a.head_dim) * sizeof(float));
}

/// s := the softmax of split `split` alone. w.query holds the unit's queries.
template <class T>
void attend_split(const AttentionArgs& a, const Unit& u, int64_t split, const Workspace& w, const State& s) {
  clear(a, u, s);
  const int64_t last = limit_of(a, u, u.rows - 1);
  const int64_t end = (split + 1) * kSplit < last ? (split + 1) * kSplit : last;
  Tile<T> tiles[2];
  int current = 0;
  const int64_t seen = first_seen(a, limit_of(a, u, 0)) / kTile * kTile;
  find_tile(a, u, split * kSplit > seen ? split * kSplit : seen, last, tiles[0]);
  for (; tiles[current].start < end; current = 1 - current) {
    const Tile<T>&tile = tiles[current], &next = tiles[1 - current];
    find_tile(a, u, tile.start + kTile, last, tiles[1 - current]);  // perhaps the next split's first
    transpose_keys(tile.k, a.head_dim, w.keys);
    score_tile(a, u, w, next);
    weigh_tile(a, u, w, s, tile.start, tile.v);
  }
}

/// whole := whole and the next split together.
inline void merge(const AttentionArgs& a, const Unit& u, const State& whole, const State& part) {
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

inline void write_out(const AttentionArgs& a, const Unit& u, const State& s) {
  const int64_t group = group_size(a);
  for (int64_t r = 0; r < u.rows; ++r) {
    float* out = a.out + ((u.first + r / group) * a.heads + u.kv_head * group + r % group) * a.head_dim;
    const Vec total = splat(s.total[r]);
    for (int64_t d = 0; d < a.head_dim; d += kLanes) store(out + d, load(s.values + r * a.head_dim + d) / total);
  }
}

}  // namespace xllm::XLLM_LEVEL
