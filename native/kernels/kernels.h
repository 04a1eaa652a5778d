// The kernels as plain functions over raw memory: what they take, and one table of them per instruction level.
//
// Common to all:
//  - what runs between kernels is float, in row-major matrices; a stride counts elements. Only weights and the KV cache
//    have a `dtype`: bf16 elements are 16 bits, the upper half of a float;
//  - nothing is allocated: what attention needs beside its operands is given as scratch of the size its function tells
//    (floats, 64-byte aligned);
//  - a row of the output depends on nothing but that row of the input (and its own KV): not on the number of rows,
//    their order or the threads;
//  - the caller holds no lock: any thread may call, one at a time per scratch. Threads are OpenMP's.
#pragma once

#include <cstdint>

namespace xllm {

struct Bf16 {
  uint16_t bits;
};

enum class Dtype : int { f32 = 0, bf16 = 1 };

/// out[r, c] = bias[c] + Σ_k x[r, k] · weight[c, k], summed in f32 in the order of k.
/// `weight` is packed: panels of 16 output columns, panel p holding [depth][16]; columns beyond `columns` are zeros.
/// `dtype` is the weight's; `bias` is [columns] or null.
struct LinearArgs {
  const float* x;
  const void* weight;
  const float* bias;
  float* out;
  int64_t rows, columns, depth;
  Dtype dtype;
};

/// out[r] = RMS norm of x[r] (or of residual[r] + x[r], which is also written back to residual), times weight.
/// residual may be null.
struct NormArgs {
  const float* x;
  float* residual;
  const float* weight;
  float* out;
  int64_t rows, width;
  float epsilon;
};

/// The norm of every query and key head in place: row r of x begins with `heads` query heads, then `kv_heads` key heads,
/// each [head_dim] and weighed by q_weight or k_weight [head_dim].
struct HeadNormArgs {
  float* x;
  const float* q_weight;
  const float* k_weight;
  int64_t rows, stride, heads, kv_heads, head_dim;
  float epsilon;
};

/// Turn the first `heads` heads of every row in place: pairs (i, i + head_dim / 2) by the angle whose cosine and sine are
/// row positions[r] of `table` [position][cos head_dim / 2 | sin head_dim / 2].
struct RopeArgs {
  float* x;
  const int32_t* positions;
  const float* table;
  int64_t rows, stride, heads, head_dim;
};

enum class Gate : int { silu = 0, gelu = 1 };

/// out[r, i] = gate(x[r, i]) · x[r, width + i], where silu(v) = v · σ(v) and gelu is its approximation by tanh.
struct GatedMulArgs {
  const float* x;
  float* out;
  int64_t rows, width;
  Gate gate;
};

/// Put row r's keys and values ([kv_heads][head_dim] each), rounded to `dtype`, at token slots[r] % block_size of block
/// slots[r] / block_size. k and v are [block][kv_heads][block_size][head_dim], contiguous within a block.
struct WriteKvArgs {
  const float* keys;
  const float* values;
  void* k;
  void* v;
  const int64_t* slots;
  int64_t rows, stride, kv_heads, head_dim, block_size, block_stride;
  Dtype dtype;
};

/// Causal attention of `requests` sequences over their paged KV. Rows query_starts[i] … query_starts[i + 1] of q are the
/// last tokens of sequence i, whose KV (context_lens[i] tokens, these rows included) lies in the blocks of row i of
/// block_tables. A row at position p sees the KV of p and of the `window` - 1 positions before it (of all, if window is
/// 0); nothing else is read into its result, whatever the memory holds. `dtype` is that of k and v.
/// REQUIRES: head_dim a multiple of 16, at most 256; heads a multiple of kv_heads; at most 32 heads per kv head.
struct AttentionArgs {
  const float* q;
  const void* k;
  const void* v;
  float* out;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_tables;
  float* scratch;
  int64_t requests, q_stride, heads, kv_heads, head_dim, block_size, block_stride, max_blocks, window;
  float scale;
  Dtype dtype;
};

/// out[r] = row token_ids[r] of a packed weight of `dtype`.
struct EmbeddingArgs {
  const int64_t* token_ids;
  const void* weight;
  float* out;
  int64_t rows, width;
  Dtype dtype;
};

struct KernelTable {
  const char* level;
  void (*linear)(const LinearArgs&);
  void (*norm)(const NormArgs&);
  void (*head_norm)(const HeadNormArgs&);
  void (*rope)(const RopeArgs&);
  void (*gated_mul)(const GatedMulArgs&);
  void (*write_kv)(const WriteKvArgs&);
  void (*attention)(const AttentionArgs&);
  int64_t (*attention_scratch)(const AttentionArgs&);
  void (*embedding)(const EmbeddingArgs&);
};

/// Copy rows of a row-major weight [rows][depth] into a packed one, from output column `first` on.
void pack_rows(const void* rows, void* packed, int64_t first, int64_t num_rows, int64_t depth, Dtype dtype);

namespace baseline { extern const KernelTable table; }
namespace v3 { extern const KernelTable table; }
namespace v4 { extern const KernelTable table; }

}  // namespace xllm
