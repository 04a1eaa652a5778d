// Attention over paged keys and values: one routine for decode and prefill.
//
//   positions    0        32        64                128                          256
//   tiles        |---------|---------|--------|--------|--- … ----------------------|      32 tokens, at absolute positions
//   splits       |-------------------------------------|--------------------- … ----|      128 tokens: an online softmax each
//
// A split's (maximum, sum, weighted values) is computed on its own and the splits are merged from the first to the last.
// So a row's result is a function of its query and its KV alone: splits may run on different threads, and other rows may
// share the tile, without changing a bit. What a row does not see is neither multiplied nor added, and tiles that no row of
// a unit sees are skipped.
#include <omp.h>

#include "softmax.h"

namespace xllm::XLLM_LEVEL {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Query tokens of one unit.
int64_t block_tokens(const AttentionArgs& a) { return kMaxRows / group_size(a); }

/// A block of query tokens and the splits they see; `part` numbers the first of them among those of all blocks.
struct Block {
  int32_t request, first, first_split, splits, part;
};

/// How the work is cut. With few units their splits are shared among the threads (`by_split`).
struct Plan {
  int64_t blocks = 0, parts = 0, max_rows = 0, threads = 1;
  bool by_split = false;
};

/// Visit every block (its `part` is 0) with the number of its tokens and of the positions they see.
template <class Visit>
void for_blocks(const AttentionArgs& a, Visit visit) {
  for (int32_t i = 0; i < a.requests; ++i) {
    const int32_t end = a.query_starts[i + 1];
    for (int32_t first = a.query_starts[i]; first < end; first += static_cast<int32_t>(block_tokens(a))) {
      const int64_t left = end - first, tokens = left < block_tokens(a) ? left : block_tokens(a);
      const int64_t limit = a.context_lens[i] - left + tokens, seen = first_seen(a, limit - tokens + 1);
      const int32_t first_split = static_cast<int32_t>(seen / kSplit);
      visit(Block{i, first, first_split, static_cast<int32_t>(ceil_div(limit, kSplit)) - first_split, 0}, tokens, limit - seen);
    }
  }
}

Plan plan_of(const AttentionArgs& a) {
  Plan p;
  int64_t products = 0;
  for_blocks(a, [&](const Block& block, int64_t tokens, int64_t positions) {
    const int64_t rows = tokens * group_size(a);
    products += 2 * rows * a.kv_heads * a.head_dim * positions;
    ++p.blocks;
    p.parts += block.splits;
    p.max_rows = rows > p.max_rows ? rows : p.max_rows;
  });
  p.threads = products < kParallelProducts ? 1 : omp_get_max_threads();
  p.by_split = p.threads > 1 && p.blocks * a.kv_heads < 4 * p.threads && p.parts > p.blocks;
  return p;
}

/// Regions of the scratch memory, each on a cache line of its own.
struct Memory {
  int64_t blocks, workspaces, states, end;  // offsets in floats
};

int64_t lines(int64_t floats) { return ceil_div(floats, kGroup) * kGroup; }

int64_t thread_floats(const AttentionArgs& a) { return lines(workspace_floats(a)) + 2 * lines(state_floats(a, kMaxRows)); }

Memory memory_of(const AttentionArgs& a, const Plan& p) {
  Memory m;
  m.blocks = 0;
  m.workspaces = m.blocks + lines(p.blocks * static_cast<int64_t>(sizeof(Block) / sizeof(float)));
  m.states = m.workspaces + p.threads * thread_floats(a);
  m.end = m.states + (p.by_split ? p.parts * a.kv_heads * lines(state_floats(a, p.max_rows)) : 0);
  return m;
}

void list_blocks(const AttentionArgs& a, Block* blocks) {
  int32_t part = 0;
  for_blocks(a, [&](Block block, int64_t, int64_t) {
    block.part = part;
    part += block.splits;
    *blocks++ = block;
  });
}

Unit unit_of(const AttentionArgs& a, const Block& block, int64_t kv_head) {
  const int64_t left = a.query_starts[block.request + 1] - block.first;
  const int64_t tokens = left < block_tokens(a) ? left : block_tokens(a);
  return {block.request, kv_head, block.first, a.context_lens[block.request] - left + 1, tokens * group_size(a)};
}

/// One thread per unit.
template <class T>
void attend_units(const AttentionArgs& a, const Plan& p, const Memory& m, const Block* blocks) {
#pragma omp parallel num_threads(static_cast<int>(p.threads))
  {
    float* own = a.scratch + m.workspaces + omp_get_thread_num() * thread_floats(a);
    const Workspace w = workspace_at(a, own);
    float* states = own + lines(workspace_floats(a));
    const State whole = state_at(states, kMaxRows), part = state_at(states + lines(state_floats(a, kMaxRows)), kMaxRows);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t block = 0; block < p.blocks; ++block)
      for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
        const Unit u = unit_of(a, blocks[block], kv_head);
        load_query(a, u, w.query);
        clear(a, u, whole);
        for (int64_t split = 0; split < blocks[block].splits; ++split) {
          attend_split<T>(a, u, blocks[block].first_split + split, w, part);
          merge(a, u, whole, part);
        }
        write_out(a, u, whole);
      }
  }
}

/// One thread per split, then the merging.
template <class T>
void attend_parts(const AttentionArgs& a, const Plan& p, const Memory& m, const Block* blocks) {
  const auto state = [&](int64_t part, int64_t kv_head) {
    return state_at(a.scratch + m.states + (part * a.kv_heads + kv_head) * lines(state_floats(a, p.max_rows)), p.max_rows);
  };
#pragma omp parallel num_threads(static_cast<int>(p.threads))
  {
    float* own = a.scratch + m.workspaces + omp_get_thread_num() * thread_floats(a);
    const Workspace w = workspace_at(a, own);
    const State whole = state_at(own + lines(workspace_floats(a)), kMaxRows);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t part = 0; part < p.parts; ++part)
      for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
        const Block* block = blocks;
        while (block->part + block->splits <= part) ++block;
        const Unit u = unit_of(a, *block, kv_head);
        load_query(a, u, w.query);
        attend_split<T>(a, u, block->first_split + part - block->part, w, state(part, kv_head));
      }
#pragma omp for collapse(2) schedule(static)
    for (int64_t block = 0; block < p.blocks; ++block)
      for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
        const Unit u = unit_of(a, blocks[block], kv_head);
        clear(a, u, whole);
        for (int64_t split = 0; split < blocks[block].splits; ++split)
          merge(a, u, whole, state(blocks[block].part + split, kv_head));
        write_out(a, u, whole);
      }
  }
}

template <class T>
void attend(const AttentionArgs& a) {
  const Plan p = plan_of(a);
  const Memory m = memory_of(a, p);
  Block* blocks = reinterpret_cast<Block*>(a.scratch + m.blocks);
  list_blocks(a, blocks);
  if (p.by_split)
    attend_parts<T>(a, p, m, blocks);
  else
    attend_units<T>(a, p, m, blocks);
}

}  // namespace

int64_t attention_scratch(const AttentionArgs& a) { return memory_of(a, plan_of(a)).end; }

void attention(const AttentionArgs& a) {
  if (a.dtype == Dtype::f32)
    attend<float>(a);
  else
    attend<Bf16>(a);
}

}  // namespace xllm::XLLM_LEVEL
