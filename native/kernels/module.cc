// Python module `_kernels`: choice of the instruction level, checking of sizes, and the GIL released around each kernel.
// Operands are addresses (tensor.data_ptr()); the caller vouches that they hold what the sizes say.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;

namespace xllm {

void pack_rows(const void* rows, void* packed, int64_t first, int64_t num_rows, int64_t depth, Dtype dtype) {
  const auto copy = [&](const auto* from, auto* to) {
    for (int64_t row = first; row < first + num_rows; ++row) {
      auto* column = to + row / 16 * depth * 16 + row % 16;
      for (int64_t k = 0; k < depth; ++k) column[k * 16] = *from++;
    }
  };
  if (dtype == Dtype::f32)
    copy(static_cast<const float*>(rows), static_cast<float*>(packed));
  else
    copy(static_cast<const uint16_t*>(rows), static_cast<uint16_t*>(packed));
}

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

Dtype dtype_of(int code) {
  require(code == 0 || code == 1, "dtype must be 0 (float32) or 1 (bfloat16)");
  return static_cast<Dtype>(code);
}

/// The tables this machine can run, the best first.
std::vector<const KernelTable*> usable_tables() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3_ready = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (v3_ready && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    tables.push_back(&v4::table);
  if (v3_ready) tables.push_back(&v3::table);
#endif
  tables.push_back(&baseline::table);
  return tables;
}

/// Kernels of one instruction level, and their scratch memory. Not for two threads at once.
class Kernels {
 public:
  explicit Kernels(const std::string& level) {
    for (const KernelTable* table : usable_tables())
      if (!table_ && (level == "auto" || level == table->level)) table_ = table;
    require(table_ != nullptr, "no such instruction level on this machine");
  }

  std::string level() const { return table_->level; }

  void linear(Address x, Address weight, Address bias, Address out, int64_t rows, int64_t columns, int64_t depth,
              int dtype) {
    const LinearArgs a{at<float>(x), at<void>(weight), at<float>(bias), at<float>(out),
                       rows,         columns,          depth,           dtype_of(dtype)};
    require(rows > 0 && columns > 0 && depth > 0, "linear: sizes must be positive");
    nb::gil_scoped_release released;
    table_->linear(a);
  }

  void norm(Address x, Address residual, Address weight, Address out, int64_t rows, int64_t width, float epsilon) {
    const NormArgs a{at<float>(x), at<float>(residual), at<float>(weight), at<float>(out), rows, width, epsilon};
    require(rows > 0 && width > 0, "norm: sizes must be positive");
    nb::gil_scoped_release released;
    table_->norm(a);
  }

  void rope(Address x, Address positions, Address table, int64_t rows, int64_t stride, int64_t heads,
            int64_t head_dim) {
    const RopeArgs a{at<float>(x), at<int32_t>(positions), at<float>(table), rows, stride, heads, head_dim};
    require(rows > 0 && heads > 0 && head_dim > 0 && head_dim % 2 == 0, "rope: head_dim must be even");
    nb::gil_scoped_release released;
    table_->rope(a);
  }

  void silu_mul(Address x, Address out, int64_t rows, int64_t width) { gated_mul(x, out, rows, width, Gate::silu); }

  void gelu_mul(Address x, Address out, int64_t rows, int64_t width) { gated_mul(x, out, rows, width, Gate::gelu); }

  void head_norm(Address x, Address q_weight, Address k_weight, int64_t rows, int64_t stride, int64_t heads,
                 int64_t kv_heads, int64_t head_dim, float epsilon) {
    const HeadNormArgs a{at<float>(x), at<float>(q_weight), at<float>(k_weight), rows, stride,
                         heads,        kv_heads,            head_dim,            epsilon};
    require(rows > 0 && heads > 0 && kv_heads > 0 && head_dim > 0, "head_norm: sizes must be positive");
    nb::gil_scoped_release released;
    table_->head_norm(a);
  }

  void write_kv(Address keys, Address values, Address k, Address v, Address slots, int64_t rows, int64_t stride,
                int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t block_stride, int dtype) {
    const WriteKvArgs a{at<float>(keys),    at<float>(values), at<void>(k), at<void>(v),
                        at<int64_t>(slots), rows,              stride,      kv_heads,
                        head_dim,           block_size,        block_stride, dtype_of(dtype)};
    require(rows > 0 && kv_heads > 0 && head_dim > 0 && block_size > 0, "write_kv: sizes must be positive");
    nb::gil_scoped_release released;
    table_->write_kv(a);
  }

  void attention(Address q, Address k, Address v, Address out, Address query_starts, Address context_lens,
                 Address block_tables, int64_t requests, int64_t q_stride, int64_t heads, int64_t kv_heads,
                 int64_t head_dim, int64_t block_size, int64_t block_stride, int64_t max_blocks, int64_t window,
                 float scale, int dtype) {
    AttentionArgs a{at<float>(q),
                    at<void>(k),
                    at<void>(v),
                    at<float>(out),
                    at<int32_t>(query_starts),
                    at<int32_t>(context_lens),
                    at<int32_t>(block_tables),
                    nullptr,
                    requests,
                    q_stride,
                    heads,
                    kv_heads,
                    head_dim,
                    block_size,
                    block_stride,
                    max_blocks,
                    window,
                    scale,
                    dtype_of(dtype)};
    require(requests > 0 && block_size > 0 && max_blocks > 0, "attention: sizes must be positive");
    require(window >= 0, "attention: window must be positive, or 0 for none");
    require(head_dim > 0 && head_dim % 16 == 0 && head_dim <= 256, "attention: head_dim must be 16, 32, … 256");
    require(kv_heads > 0 && heads % kv_heads == 0 && heads / kv_heads <= 32, "attention: 1 to 32 heads per kv head");
    nb::gil_scoped_release released;
    a.scratch = scratch(table_->attention_scratch(a));
    table_->attention(a);
  }

  void embedding(Address token_ids, Address weight, Address out, int64_t rows, int64_t width, int dtype) {
    const EmbeddingArgs a{at<int64_t>(token_ids), at<void>(weight), at<float>(out), rows, width, dtype_of(dtype)};
    require(rows > 0 && width > 0, "embedding: sizes must be positive");
    nb::gil_scoped_release released;
    table_->embedding(a);
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };

  void gated_mul(Address x, Address out, int64_t rows, int64_t width, Gate gate) {
    const GatedMulArgs a{at<float>(x), at<float>(out), rows, width, gate};
    require(rows > 0 && width > 0, "gated product: sizes must be positive");
    nb::gil_scoped_release released;
    table_->gated_mul(a);
  }

  /// At least `floats` floats, aligned to a cache line; kept and grown between calls.
  float* scratch(int64_t floats) {
    if (floats > capacity_) {
      scratch_.reset();
      capacity_ = (floats + 1023) / 1024 * 1024;
      scratch_.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(capacity_) * sizeof(float))));
      if (!scratch_) {
        capacity_ = 0;
        throw std::bad_alloc();
      }
    }
    return scratch_.get();
  }

  const KernelTable* table_ = nullptr;
  std::unique_ptr<float, Free> scratch_;
  int64_t capacity_ = 0;
};

std::vector<std::string> levels() {
  std::vector<std::string> names;
  for (const KernelTable* table : usable_tables()) names.emplace_back(table->level);
  return names;
}

void pack(Address rows, Address packed, int64_t first, int64_t num_rows, int64_t depth, int dtype) {
  require(first >= 0 && num_rows > 0 && depth > 0, "pack_rows: sizes must be positive");
  const Dtype type = dtype_of(dtype);
  nb::gil_scoped_release released;
  pack_rows(at<void>(rows), at<void>(packed), first, num_rows, depth, type);
}

/// Ask for huge pages in the part of [address, address + nbytes) that whole 2 MiB pages can cover. A wish: never fails.
void prefer_huge_pages(Address address, int64_t nbytes) {
#ifdef MADV_HUGEPAGE
  const Address size = Address{1} << 21;
  const Address first = (address + size - 1) & ~(size - 1), last = (address + static_cast<Address>(nbytes)) & ~(size - 1);
  if (first < last) madvise(at<void>(first), last - first, MADV_HUGEPAGE);
#else
  (void)address, (void)nbytes;
#endif
}

}  // namespace
}  // namespace xllm

NB_MODULE(_kernels, m) {
  using xllm::Kernels;
  m.def("levels", &xllm::levels);
  m.def("pack_rows", &xllm::pack);
  m.def("prefer_huge_pages", &xllm::prefer_huge_pages);
  nb::class_<Kernels>(m, "Kernels")
      .def(nb::init<const std::string&>(), nb::arg("level") = "auto")
      .def_prop_ro("level", &Kernels::level)
      .def("linear", &Kernels::linear)
      .def("norm", &Kernels::norm)
      .def("rope", &Kernels::rope)
      .def("head_norm", &Kernels::head_norm)
      .def("silu_mul", &Kernels::silu_mul)
      .def("gelu_mul", &Kernels::gelu_mul)
      .def("write_kv", &Kernels::write_kv)
      .def("attention", &Kernels::attention)
      .def("embedding", &Kernels::embedding);
}
