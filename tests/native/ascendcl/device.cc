#include "device.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <unistd.h>

#include "call.h"
#include "ledger.h"
#include "queue.h"
#include "registry.h"
#include "settings.h"
#include "vmm.h"

namespace ascendcl {
namespace {

struct Devices {
  std::mutex mutex;
  Registry<Context> contexts{5};
  std::map<int, void*> primary;    // device → the context that SetDevice binds
  std::map<int, int> uses;         // device → SetDevice less ResetDevice
  std::atomic<bool> initialised{false};
  std::atomic<bool> opened{false};
};

Devices& devices() {
  static Devices& kept = *new Devices;  // never destroyed: calls may come during exit
  return kept;
}

thread_local void* bound_context = nullptr;

void* make_context(int device) {
  auto context = std::make_shared<Context>();
  context->device = device;
  context->default_stream = create_stream(device, true);
  const std::lock_guard lock(devices().mutex);
  return devices().contexts.add(std::move(context));
}

void* primary_context(int device) {
  {
    const std::lock_guard lock(devices().mutex);
    if (const auto found = devices().primary.find(device); found != devices().primary.end()) return found->second;
  }
  void* context = make_context(device);
  const std::lock_guard lock(devices().mutex);
  return devices().primary.emplace(device, context).first->second;
}

int visible_count() { return static_cast<int>(settings().devices.size()); }

}  // namespace

int physical_device(int device) {
  if (device < 0 || device >= visible_count()) {
    violate(kBadDevice, "devices are visible ones", text("device %d of %d visible ones", device, visible_count()));
  }
  return settings().devices[static_cast<std::size_t>(device)];
}

std::shared_ptr<Context> current_context() {
  const std::lock_guard lock(devices().mutex);
  const std::shared_ptr<Context> context = devices().contexts.find(bound_context);
  if (context == nullptr) {
    violate(kNoContext, "each thread sets its device", "aclrtSetDevice did not run in this thread");
  }
  return context;
}

void require_initialised() {
  if (!devices().initialised) violate(kNotInitialised, "aclInit comes first", "aclInit did not run");
}

void require_opened() {
  // Driver rule 11: the first SetDevice of the process opens the shared memory.
  if (!devices().opened) violate(kBadHandle, "the process sets a device first", "aclrtSetDevice never ran");
}

}  // namespace ascendcl

using namespace ascendcl;  // NOLINT: the exported names follow

ASCENDCL_API int aclInit(const char* configuration) {
  return call("aclInit", {configuration}, [] {
    if (devices().initialised.exchange(true)) fail(kRepeatInitialise, "aclInit ran before");
  });
}

ASCENDCL_API int aclFinalize() {
  return call("aclFinalize", {}, [] {
    require_initialised();
    devices().initialised = false;
  });
}

ASCENDCL_API const char* aclGetRecentErrMsg() { return take_recent_text(); }

ASCENDCL_API int aclrtSetDevice(std::int32_t device) {
  return call("aclrtSetDevice", {device}, [&] {
    require_initialised();
    physical_device(device);
    bound_context = primary_context(device);
    devices().opened = true;
    const std::lock_guard lock(devices().mutex);
    ++devices().uses[device];
  });
}

ASCENDCL_API int aclrtResetDevice(std::int32_t device) {
  return call("aclrtResetDevice", {device}, [&] {
    physical_device(device);
    const std::lock_guard lock(devices().mutex);
    int& uses = devices().uses[device];
    if (uses == 0) violate(kInvalidValue, "reset what was set", text("device %d is not in use", device));
    --uses;
  });
}

ASCENDCL_API int aclrtResetDeviceForce(std::int32_t device) {
  return call("aclrtResetDeviceForce", {device}, [&] {
    physical_device(device);
    const std::lock_guard lock(devices().mutex);
    devices().uses[device] = 0;
  });
}

ASCENDCL_API int aclrtGetDevice(std::int32_t* device) {
  return call("aclrtGetDevice", {device}, [&] {
    check_given(device, "the result");
    const std::lock_guard lock(devices().mutex);
    const auto context = devices().contexts.find(bound_context);
    if (context == nullptr) fail(kNoContext, "aclrtSetDevice did not run in this thread");  // a question, no violation
    *device = context->device;
  });
}

ASCENDCL_API int aclrtGetDeviceCount(std::uint32_t* count) {
  return call("aclrtGetDeviceCount", {count}, [&] {
    check_given(count, "the result");
    *count = static_cast<std::uint32_t>(visible_count());
  });
}

ASCENDCL_API int aclrtCreateContext(void** context, std::int32_t device) {
  return call("aclrtCreateContext", {context, device}, [&] {
    check_given(context, "the result");
    require_initialised();
    physical_device(device);
    *context = bound_context = make_context(device);
    devices().opened = true;
  });
}

ASCENDCL_API int aclrtDestroyContext(void* context) {
  return call("aclrtDestroyContext", {context}, [&] {
    const std::lock_guard lock(devices().mutex);
    if (devices().contexts.find(context) == nullptr) violate(kBadHandle, "handles are alive", "the context is none");
    devices().contexts.remove(context);
  });
}

ASCENDCL_API int aclrtSetCurrentContext(void* context) {
  return call("aclrtSetCurrentContext", {context}, [&] {
    const std::lock_guard lock(devices().mutex);
    if (devices().contexts.find(context) == nullptr) violate(kBadHandle, "handles are alive", "the context is none");
    bound_context = context;
  });
}

ASCENDCL_API int aclrtGetCurrentContext(void** context) {
  return call("aclrtGetCurrentContext", {context}, [&] {
    check_given(context, "the result");
    if (bound_context == nullptr) fail(kNoContext, "aclrtSetDevice did not run in this thread");  // a question
    *context = bound_context;
  });
}

ASCENDCL_API int aclrtGetPrimaryCtxState(std::int32_t device, std::uint32_t* flags, std::int32_t* active) {
  return call("aclrtGetPrimaryCtxState", {device}, [&] {
    check_given(active, "the result");
    physical_device(device);
    const std::lock_guard lock(devices().mutex);
    if (flags != nullptr) *flags = 0;
    *active = devices().uses[device] > 0;
  });
}

ASCENDCL_API int aclrtGetMemInfo(int attribute, std::size_t* free, std::size_t* total) {
  return call("aclrtGetMemInfo", {attribute}, [&] {
    check_given(free, "the result");
    check_given(total, "the result");
    if (attribute < 0 || attribute > kMemP2pHuge1G) {
      violate(kBadArgument, "memory attributes are known ones", text("attribute %d", attribute));
    }
    const DeviceMemory memory = device_memory(physical_device(current_context()->device));
    *free = memory.free;
    *total = memory.total;
  });
}

ASCENDCL_API const char* aclrtGetSocName() { return settings().soc.c_str(); }

ASCENDCL_API int aclrtGetRunMode(int* mode) {
  return call("aclrtGetRunMode", {mode}, [&] {
    check_given(mode, "the result");
    *mode = 1;  // the program runs on the host
  });
}

ASCENDCL_API int aclrtSynchronizeDevice() {
  return call("aclrtSynchronizeDevice", {}, [] {
    forbid_while_capturing("aclrtSynchronizeDevice");
    synchronize_device(current_context()->device, -1);
  });
}

ASCENDCL_API int aclrtSynchronizeDeviceWithTimeout(std::int32_t milliseconds) {
  return call("aclrtSynchronizeDeviceWithTimeout", {milliseconds}, [&] {
    forbid_while_capturing("aclrtSynchronizeDeviceWithTimeout");
    synchronize_device(current_context()->device, milliseconds);
  });
}

ASCENDCL_API int aclrtDeviceCanAccessPeer(std::int32_t* can, std::int32_t device, std::int32_t peer) {
  return call("aclrtDeviceCanAccessPeer", {can, device, peer}, [&] {
    check_given(can, "the result");
    physical_device(device);
    physical_device(peer);
    *can = device != peer;
  });
}

ASCENDCL_API int aclrtDeviceEnablePeerAccess(std::int32_t peer, std::uint32_t flags) {
  return call("aclrtDeviceEnablePeerAccess", {peer, flags}, [&] {
    check_flags(flags, 0);
    physical_device(peer);
    current_context();
  });
}

ASCENDCL_API int aclrtDeviceGetBareTgid(std::int32_t* process) {
  return call("aclrtDeviceGetBareTgid", {process}, [&] {
    check_given(process, "the result");
    *process = ::getpid();
  });
}
