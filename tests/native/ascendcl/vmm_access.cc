// Virtual memory calls of later releases (CANN 8.5 and on): access rights, handles found by address. Built only where
// the emulated release has them; some want a driver as new, too.
#include "call.h"
#include "device.h"
#include "memory_map.h"
#include "queue.h"
#include "settings.h"
#include "sharing.h"
#include "vmm.h"

namespace {

using namespace ascendcl;  // NOLINT: a file of exported names

constexpr int kNewDriver = 26;

void require_driver(const char* what) {
  if (settings().driver < kNewDriver) {
    fail(kNotSupported, text("%s wants driver %d, this is %d", what, kNewDriver, settings().driver));
  }
}

// The second form of export takes 8 bytes (default) or 128 (fabric, which only an A3 has).
void check_shareable_type(int type) {
  if (type != kShareableDefault) fail(kNotSupported, text("shareable handles of type %d", type));
}

}  // namespace

ASCENDCL_API int aclrtMemSetAccess(void* address, std::size_t nbytes, const AccessDescription* descriptions,
                                   std::size_t count) {
  return call("aclrtMemSetAccess", {address, nbytes, descriptions, count}, [&] {
    check_given(address, "the address");
    check_given(descriptions, "the descriptions");
    if (nbytes == 0 || count == 0) violate(kBadArgument, "sizes are positive", "size or count 0");
    require_opened();
    for (std::size_t index = 0; index < count; ++index) {
      if (descriptions[index].flags != kAccessReadWrite) {
        violate(kNotSupported, "access is read and write", text("flags %d", descriptions[index].flags));
      }
    }
    const auto lock = memory_map().lock();
    memory_map().set_access(address_of(address), nbytes);
  });
}

ASCENDCL_API int aclrtMemGetAccess(void* address, const Location* location, std::uint64_t* flags) {
  return call("aclrtMemGetAccess", {address, location}, [&] {
    check_given(address, "the address");
    check_given(location, "the location");
    check_given(flags, "the result");
    const auto lock = memory_map().lock();
    const auto* extent = memory_map().find(address_of(address));
    if (extent == nullptr) violate(kDriverError, "ask about mapped addresses", text("%p is not mapped", address));
    *flags = extent->second.accessible ? static_cast<std::uint64_t>(kAccessReadWrite) : 0;
  });
}

ASCENDCL_API int aclrtMemMapNoAccess(void* address, std::size_t nbytes, std::size_t offset, void* handle,
                                     std::uint64_t flags) {
  return call("aclrtMemMapNoAccess", {address, nbytes, offset, handle, flags}, [&] {
    require_driver("mapping without access");
    map_memory(address, nbytes, offset, handle, flags, false);
  });
}

ASCENDCL_API int aclrtMemRetainAllocationHandle(void* address, void** handle) {
  return call("aclrtMemRetainAllocationHandle", {address}, [&] {
    check_given(address, "the address");
    check_given(handle, "the result");
    require_driver("retaining a handle");
    const auto lock = memory_map().lock();
    *handle = memory_map().retain(address_of(address));
    trace_output(*handle);
  });
}

ASCENDCL_API int aclrtMemGetAllocationPropertiesFromHandle(void* handle, PhysicalProperties* properties) {
  return call("aclrtMemGetAllocationPropertiesFromHandle", {handle}, [&] {
    check_given(handle, "the handle");
    check_given(properties, "the result");
    const auto lock = memory_map().lock();
    const auto physical = memory_map().owned(handle);
    *properties = {};
    properties->attribute = physical->page_bytes == kGiB ? kHbmHuge1G : kHbmHuge;
    properties->location.type = physical->device >= 0 ? kDevice : kHost;
    properties->location.id = physical->device >= 0 ? static_cast<std::uint32_t>(physical->device) : 0;
  });
}

ASCENDCL_API int aclrtMemGetAddressRange(void* address, void** base, std::size_t* nbytes) {
  return call("aclrtMemGetAddressRange", {address}, [&] {
    check_given(address, "the address");
    const auto lock = memory_map().lock();
    const auto* extent = memory_map().find(address_of(address));
    if (extent == nullptr) violate(kDriverError, "ask about mapped addresses", text("%p is not mapped", address));
    if (base != nullptr) *base = reinterpret_cast<void*>(extent->first);
    if (nbytes != nullptr) *nbytes = extent->second.nbytes;
  });
}

ASCENDCL_API int aclrtMemExportToShareableHandleV2(void* handle, std::uint64_t flags, int type, void* shareable) {
  return call("aclrtMemExportToShareableHandleV2", {handle, flags, type}, [&] {
    check_given(handle, "the handle");
    check_given(shareable, "the result");
    check_flags(flags, 1);
    check_shareable_type(type);
    require_opened();
    *static_cast<std::uint64_t*>(shareable) = export_handle(handle, flags == 0);
  });
}

ASCENDCL_API int aclrtMemSetPidToShareableHandleV2(void* shareable, int type, const std::int32_t* processes,
                                                   std::size_t count) {
  return call("aclrtMemSetPidToShareableHandleV2", {shareable, type, count}, [&] {
    check_given(shareable, "the shareable handle");
    check_given(processes, "the processes");
    check_shareable_type(type);
    allow_import(*static_cast<const std::uint64_t*>(shareable), processes, count);
  });
}

ASCENDCL_API int aclrtMemImportFromShareableHandleV2(const void* shareable, int type, std::uint64_t flags,
                                                     void** handle) {
  return call("aclrtMemImportFromShareableHandleV2", {shareable, type, flags}, [&] {
    check_given(shareable, "the shareable handle");
    check_given(handle, "the result");
    check_flags(flags, 0);
    check_shareable_type(type);
    const int device = physical_device(current_context()->device);
    *handle = import_handle(*static_cast<const std::uint64_t*>(shareable), device);
  });
}
