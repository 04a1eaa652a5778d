// Virtual memory calls of the first release that had them (CANN 7.0): reserve, create, map and their opposites.
#include "call.h"
#include "device.h"
#include "memory_map.h"
#include "queue.h"
#include "vmm.h"

namespace ascendcl {
namespace {

bool is_giant(int attribute) {
  return attribute == kHbmHuge1G || attribute == kHbmP2pHuge1G || attribute == kMemHuge1G || attribute == kMemP2pHuge1G;
}

void check_attribute(const PhysicalProperties& properties) {
  const int attribute = properties.attribute;
  const bool is_known = attribute >= kDdrHuge && attribute <= kMemP2pHuge1G;
  if (!is_known) violate(kBadArgument, "memory attributes are known ones", text("attribute %d", attribute));
  const bool is_ddr = attribute <= kDdrNormal;
  const bool on_device = properties.location.type == kDevice;
  if (attribute < kMemNormal && is_ddr == on_device) {
    violate(kBadArgument, "the attribute fits the location",
            text("attribute %d with location type %d", attribute, properties.location.type));
  }
}

}  // namespace

void check_flags(std::uint64_t flags, std::uint64_t most) {
  if (flags > most) violate(kBadArgument, "flags are zero", text("flags %llu", static_cast<unsigned long long>(flags)));
}

void check_given(const void* pointer, const char* what) {
  if (pointer == nullptr) violate(kBadArgument, "no null pointers", text("%s is null", what));
}

std::uint64_t page_bytes_of(const PhysicalProperties* properties) {
  check_given(properties, "the properties");
  if (properties->handle_type != 0 || properties->allocation_type != 0) {
    violate(kBadArgument, "handle type none, allocation type pinned",
            text("handle type %d, allocation type %d", properties->handle_type, properties->allocation_type));
  }
  const int type = properties->location.type;
  if (type != kHost && type != kDevice && type != kHostNuma) {
    violate(kBadArgument, "the location is a host or a device", text("location type %d", type));
  }
  check_attribute(*properties);
  if (properties->reserve != 0) violate(kInvalidValue, "reserve is zero", "the properties' last field is not");
  if (type == kDevice) physical_device(static_cast<int>(properties->location.id));
  return is_giant(properties->attribute) ? kGiB : kPage;
}

void map_memory(void* address, std::size_t nbytes, std::size_t offset, void* handle, std::uint64_t flags,
                bool accessible) {
  check_given(address, "the address");
  check_given(handle, "the handle");
  if (nbytes == 0) violate(kBadArgument, "sizes are positive", "size 0");
  check_flags(flags, 0);
  if (offset != 0) violate(kInvalidValue, "map from offset 0", text("offset %zu", offset));
  require_opened();
  const auto lock = memory_map().lock();
  memory_map().map(address_of(address), nbytes, handle, accessible);
}

}  // namespace ascendcl

using namespace ascendcl;  // NOLINT: the exported names follow

ASCENDCL_API int aclrtReserveMemAddress(void** out, std::size_t nbytes, std::size_t alignment, void* expected,
                                        std::uint64_t flags) {
  return call("aclrtReserveMemAddress", {nbytes, alignment, expected, flags}, [&] {
    check_given(out, "the result");
    if (nbytes == 0) violate(kBadArgument, "sizes are positive", "size 0");
    check_flags(flags, 1);
    if (alignment != 0) violate(kInvalidValue, "reserve with alignment 0", text("alignment %zu", alignment));
    if (expected != nullptr) violate(kInvalidValue, "reserve anywhere", text("address %p is wished for", expected));
    // No device needed: torch_npu probes with this call before it sets one.
    const auto lock = memory_map().lock();
    *out = reinterpret_cast<void*>(memory_map().reserve(nbytes));
    trace_output(*out);
  });
}

ASCENDCL_API int aclrtReleaseMemAddress(void* address) {
  return call("aclrtReleaseMemAddress", {address}, [&] {
    check_given(address, "the address");
    const auto lock = memory_map().lock();
    memory_map().release(address_of(address));
  });
}

ASCENDCL_API int aclrtMallocPhysical(void** out, std::size_t nbytes, const PhysicalProperties* properties,
                                     std::uint64_t flags) {
  return call("aclrtMallocPhysical", {nbytes, properties, flags}, [&] {
    check_given(out, "the result");
    if (nbytes == 0) violate(kBadArgument, "sizes are positive", "size 0");
    check_flags(flags, 0);
    const std::uint64_t page_bytes = page_bytes_of(properties);
    if (nbytes % kPage != 0) violate(kInvalidValue, "handles are whole pages of 2 MiB", text("size %zu", nbytes));
    require_opened();
    const bool on_device = properties->location.type == kDevice;
    const int device = on_device ? physical_device(static_cast<int>(properties->location.id)) : -1;
    const auto lock = memory_map().lock();
    *out = memory_map().create((nbytes + page_bytes - 1) / page_bytes * page_bytes, page_bytes, device);
    trace_output(*out);
  });
}

ASCENDCL_API int aclrtFreePhysical(void* handle) {
  return call("aclrtFreePhysical", {handle}, [&] {
    check_given(handle, "the handle");
    require_opened();
    const auto lock = memory_map().lock();
    memory_map().destroy(handle);
  });
}

ASCENDCL_API int aclrtMapMem(void* address, std::size_t nbytes, std::size_t offset, void* handle, std::uint64_t flags) {
  return call("aclrtMapMem", {address, nbytes, offset, handle, flags},
              [&] { map_memory(address, nbytes, offset, handle, flags, true); });
}

ASCENDCL_API int aclrtUnmapMem(void* address) {
  return call("aclrtUnmapMem", {address}, [&] {
    check_given(address, "the address");
    require_opened();
    // Driver rule 10: the device does not wait; who unmaps under queued work gets an asynchronous fault later.
    const std::string pending = pending_work_at(address_of(address));
    const auto lock = memory_map().lock();
    memory_map().unmap(address_of(address));
    if (!pending.empty()) note_violation("aclrtUnmapMem", "no queued work on a page that is unmapped", pending);
  });
}
