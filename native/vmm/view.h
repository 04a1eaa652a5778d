// Memory as seen by a tensor library: DLPack descriptions of address ranges, without linking that library, and plain
// anonymous memory. Knows no Python; module.cc wraps a description into a capsule.
//
// The deleter of a view runs wherever the last tensor dies, on any thread: it only counts and frees, takes no lock and
// calls nothing. Nobody owns the range through a view; whoever releases the range must see count() == 0 first.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "driver.h"

namespace xllm::vmm {

// The DLPack 0.x ABI, our own minimal declarations.
struct DLDevice {
  std::int32_t type;  // 1 = host, 12 = a device of an extension (npu)
  std::int32_t id;
};
struct DLDataType {
  std::uint8_t code;  // 0 int, 1 unsigned, 2 float, 4 bfloat
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

// Counts the tensors that look at one range.
class Views {
 public:
  // A description of `shape` at `address`; reads and writes nothing there. Free it by calling its deleter.
  DLManagedTensor* describe(Address address, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides,
                            DLDataType dtype, DLDevice device);
  std::int64_t count() const { return *alive_; }

 private:
  std::shared_ptr<std::atomic<std::int64_t>> alive_ = std::make_shared<std::atomic<std::int64_t>>(0);
};

// Private zeroed memory that costs nothing until it is touched; 2 MiB aligned, huge pages where the system gives them.
class AnonymousMemory {
 public:
  explicit AnonymousMemory(std::size_t nbytes);  // throws Shortage(reserve)
  AnonymousMemory(const AnonymousMemory&) = delete;
  AnonymousMemory& operator=(const AnonymousMemory&) = delete;
  // No destructor: memory that was never freed explicitly outlives every view.
  void free();  // idempotent
  Address address() const { return address_; }
  std::size_t nbytes() const { return nbytes_; }

 private:
  Address address_;
  std::size_t nbytes_;
};

}  // namespace xllm::vmm
