// Virtual memory calls of the second release (CANN 8.0): granularity, and handles shared between processes.
#include "call.h"
#include "device.h"
#include "memory_map.h"
#include "sharing.h"
#include "vmm.h"

using namespace ascendcl;  // NOLINT: the exported names follow

ASCENDCL_API int aclrtMemGetAllocationGranularity(const PhysicalProperties* properties, int option,
                                                  std::size_t* granularity) {
  return call("aclrtMemGetAllocationGranularity", {properties, option}, [&] {
    check_given(granularity, "the result");
    const std::uint64_t page_bytes = page_bytes_of(properties);
    if (option != kGranularityMinimum && option != kGranularityRecommended) {
      violate(kNotSupported, "the option is minimum or recommended", text("option %d", option));
    }
    *granularity = page_bytes;
  });
}

ASCENDCL_API int aclrtMemExportToShareableHandle(void* handle, int handle_type, std::uint64_t flags,
                                                 std::uint64_t* shareable) {
  return call("aclrtMemExportToShareableHandle", {handle, handle_type, flags}, [&] {
    check_given(handle, "the handle");
    check_given(shareable, "the result");
    if (handle_type != 0) violate(kBadArgument, "handle type none", text("handle type %d", handle_type));
    check_flags(flags, 1);
    require_opened();
    *shareable = export_handle(handle, flags == 0);
    trace_output(*shareable);
  });
}

ASCENDCL_API int aclrtMemSetPidToShareableHandle(std::uint64_t shareable, const std::int32_t* processes,
                                                 std::size_t count) {
  return call("aclrtMemSetPidToShareableHandle", {shareable, count}, [&] {
    check_given(processes, "the processes");
    if (count == 0) violate(kBadArgument, "sizes are positive", "no process");
    allow_import(shareable, processes, count);
  });
}

ASCENDCL_API int aclrtMemImportFromShareableHandle(std::uint64_t shareable, std::int32_t device, void** handle) {
  return call("aclrtMemImportFromShareableHandle", {shareable, device}, [&] {
    check_given(handle, "the result");
    require_opened();
    *handle = import_handle(shareable, physical_device(device));
    trace_output(*handle);
  });
}
