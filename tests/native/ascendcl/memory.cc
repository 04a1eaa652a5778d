// Blocks of device memory, pinned host memory, and what a pointer points to.
#include <sys/mman.h>

#include <map>
#include <mutex>

#include "call.h"
#include "device.h"
#include "host_memory.h"
#include "memory_map.h"
#include "queue.h"
#include "vmm.h"

namespace ascendcl {
namespace {

struct HostBlock {
  std::uint64_t nbytes;
  bool is_own;  // of aclrtMallocHost; else registered
};

struct HostMemory {
  std::mutex mutex;
  std::map<std::uint64_t, HostBlock> blocks;
};

HostMemory& host_memory() {
  static HostMemory& kept = *new HostMemory;  // never destroyed: calls may come during exit
  return kept;
}

void allocate_host(void** out, std::size_t nbytes) {
  check_given(out, "the result");
  if (nbytes == 0) violate(kBadArgument, "sizes are positive", "size 0");
  current_context();
  void* mapped = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) fail(kOutOfMemory, text("the host has no %zu bytes", nbytes));
  const std::lock_guard lock(host_memory().mutex);
  host_memory().blocks[address_of(mapped)] = {nbytes, true};
  *out = mapped;
}

void remove_host(void* address, bool is_own) {
  const std::lock_guard lock(host_memory().mutex);
  const auto found = host_memory().blocks.find(address_of(address));
  if (found == host_memory().blocks.end() || found->second.is_own != is_own) {
    violate(kInvalidValue, "give back what was taken", text("%p is no such host memory", address));
  }
  if (is_own) ::munmap(address, found->second.nbytes);
  host_memory().blocks.erase(found);
}

void register_host(void* address, std::uint64_t nbytes) {
  check_given(address, "the address");
  if (nbytes == 0) violate(kBadArgument, "sizes are positive", "size 0");
  const std::lock_guard lock(host_memory().mutex);
  host_memory().blocks[address_of(address)] = {nbytes, false};
}

void allocate_device(const char* name, void** out, std::size_t nbytes) {
  check_given(out, "the result");
  if (nbytes == 0) violate(kBadArgument, "sizes are positive", text("%s of size 0", name));
  const int device = physical_device(current_context()->device);
  const auto lock = memory_map().lock();
  *out = reinterpret_cast<void*>(memory_map().allocate(nbytes, device));
  trace_output(*out);
}

}  // namespace

bool is_pinned(const void* address, std::uint64_t nbytes) {
  const std::lock_guard lock(host_memory().mutex);
  auto found = host_memory().blocks.upper_bound(address_of(address));
  if (found == host_memory().blocks.begin()) return false;
  --found;
  return address_of(address) + nbytes <= found->first + found->second.nbytes;
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> host_blocks() {
  const std::lock_guard lock(host_memory().mutex);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> blocks;
  for (const auto& [address, block] : host_memory().blocks) blocks.emplace_back(address, block.nbytes);
  return blocks;
}

}  // namespace ascendcl

using namespace ascendcl;  // NOLINT: the exported names follow

ASCENDCL_API int aclrtMalloc(void** out, std::size_t nbytes, int policy) {
  return call("aclrtMalloc", {nbytes, policy}, [&] { allocate_device("aclrtMalloc", out, nbytes); });
}

ASCENDCL_API int aclrtMallocAlign32(void** out, std::size_t nbytes, int policy) {
  return call("aclrtMallocAlign32", {nbytes, policy}, [&] { allocate_device("aclrtMallocAlign32", out, nbytes); });
}

ASCENDCL_API int aclrtFree(void* address) {
  return call("aclrtFree", {address}, [&] {
    check_given(address, "the address");
    const std::string pending = pending_work_at(address_of(address));
    const auto lock = memory_map().lock();
    memory_map().free_block(address_of(address));
    if (!pending.empty()) note_violation("aclrtFree", "no queued work on a block that is freed", pending);
  });
}

ASCENDCL_API int aclrtMallocHost(void** out, std::size_t nbytes) {
  return call("aclrtMallocHost", {nbytes}, [&] { allocate_host(out, nbytes); });
}

ASCENDCL_API int aclrtMallocHostWithCfg(void** out, std::uint64_t nbytes, void* configuration) {
  return call("aclrtMallocHostWithCfg", {nbytes, configuration}, [&] { allocate_host(out, nbytes); });
}

ASCENDCL_API int aclrtFreeHost(void* address) {
  return call("aclrtFreeHost", {address}, [&] { remove_host(address, true); });
}

ASCENDCL_API int aclrtHostRegister(void* address, std::uint64_t nbytes, int type, void** device_address) {
  return call("aclrtHostRegister", {address, nbytes, type}, [&] {
    register_host(address, nbytes);
    if (device_address != nullptr) *device_address = address;
  });
}

ASCENDCL_API int aclrtHostRegisterV2(void* address, std::uint64_t nbytes, std::uint32_t flags) {
  return call("aclrtHostRegisterV2", {address, nbytes, flags}, [&] { register_host(address, nbytes); });
}

ASCENDCL_API int aclrtHostUnregister(void* address) {
  return call("aclrtHostUnregister", {address}, [&] { remove_host(address, false); });
}

ASCENDCL_API int aclrtPointerGetAttributes(const void* address, PointerAttributes* attributes) {
  return call("aclrtPointerGetAttributes", {address}, [&] {
    check_given(address, "the address");
    check_given(attributes, "the result");
    const bool in_window = VirtualSpace::contains(address_of(address));
    const auto lock = memory_map().lock();
    const auto* extent = memory_map().find(address_of(address));
    // An address that is reserved and not mapped has no attributes.
    if (in_window && extent == nullptr) {
      violate(kDriverError, "ask about mapped addresses", text("%p is not mapped", address));
    }
    const bool on_device = extent != nullptr && extent->second.device >= 0;
    *attributes = {};
    attributes->location.type = on_device ? kDevice : kHost;
    attributes->location.id = on_device ? static_cast<std::uint32_t>(extent->second.device) : 0;
    attributes->page_size = extent != nullptr ? static_cast<std::uint32_t>(kPage) : 4096;
  });
}
