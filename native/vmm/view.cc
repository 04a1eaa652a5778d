#include "view.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "host_pages.h"

namespace xllm::vmm {
namespace {

struct View {
  std::vector<std::int64_t> shape, strides;
  std::shared_ptr<std::atomic<std::int64_t>> alive;
  DLManagedTensor managed;
};

void delete_view(DLManagedTensor* managed) {
  auto* const view = static_cast<View*>(managed->context);
  --*view->alive;
  delete view;
}

}  // namespace

DLManagedTensor* Views::describe(Address address, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides,
                                 DLDataType dtype, DLDevice device) {
  auto* const view = new View{std::move(shape), std::move(strides), alive_, {}};
  view->managed.tensor = {reinterpret_cast<void*>(address),  // NOLINT
                          device,
                          static_cast<std::int32_t>(view->shape.size()),
                          dtype,
                          view->shape.data(),
                          view->strides.data(),
                          0};
  view->managed.context = view;
  view->managed.deleter = delete_view;
  ++*alive_;
  return &view->managed;
}

AnonymousMemory::AnonymousMemory(std::size_t nbytes) : address_(reserve_space(nbytes, kHugePage)), nbytes_(nbytes) {
  if (address_ == 0 || ::mprotect(reinterpret_cast<void*>(address_), nbytes, PROT_READ | PROT_WRITE) != 0) {  // NOLINT
    const int code = errno;
    free();
    throw Shortage(Verb::kReserve, code, 0, std::string("anonymous memory: ") + std::strerror(code));
  }
  ::madvise(reinterpret_cast<void*>(address_), nbytes, MADV_HUGEPAGE);  // NOLINT: advice; without it pages are small
}

void AnonymousMemory::free() {
  if (address_ != 0) release_space(std::exchange(address_, 0), nbytes_);
}

}  // namespace xllm::vmm
