// What the acl driver calls of libascendcl.so: our own declarations of the vendor's ABI, which has not changed since
// CANN 7.0. Knows no pages and no books. Every call returns the vendor's code, 0 for success.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "driver.h"
#include "dylib.h"

namespace xllm::vmm {

inline constexpr int kAclRepeatInitialize = 100002;  // somebody else in the process, torch_npu say, was first
inline constexpr int kAclUnsupported = 207000;
inline constexpr int kAclOutOfMemory = 207001;
inline constexpr int kAclDeviceOutOfMemory = 207018;

inline constexpr std::int32_t kAclHbmHuge = 4;  // 2 MiB pages; parts without HBM serve them from DDR
inline constexpr std::int32_t kAclHbm = 1;      // aclrtGetMemInfo: huge and normal pages together
inline constexpr std::int32_t kAclOnDevice = 1;
inline constexpr std::int32_t kAclMinimum = 0;  // granularity
// Documents up to CANN 8: 1 reserves for huge pages and must match the pages; newer ones accept it unread.
inline constexpr std::uint64_t kAclReserveHuge = 1;

struct AclLocation {
  std::uint32_t id;
  std::int32_t type;
};
struct AclPageKind {
  std::int32_t handle_type;      // 0: not to be shared
  std::int32_t allocation_type;  // 0: pinned
  std::int32_t memory;
  AclLocation location;
  std::uint64_t reserved;  // 0
};
static_assert(sizeof(AclLocation) == 8 && sizeof(AclPageKind) == 32 && offsetof(AclPageKind, location) == 12 &&
              offsetof(AclPageKind, reserved) == 24);

using AclHandle = void*;

// Shortage where the code says that freeing memory would help, else Error.
[[noreturn]] void raise_acl(Verb verb, int code, Address address, const std::string& text);

struct AclApi {
  // Opens `library`; empty: libascendcl.so where the loader or the toolkit's set_env.sh says it is. Throws
  // std::runtime_error with the reason.
  explicit AclApi(const std::string& library);

  // Initialises the runtime once per process. It is never finalized: others in the process may still use it.
  void start() const;                                      // throws Error(info)
  void set_device(int device) const;                       // of the calling thread; throws Error(info)
  std::size_t granularity(const AclPageKind& kind) const;  // bytes of a page; throws Error(info)
  // The failed call in words: its name and the vendor's text.
  std::string explain(const char* function, int code) const;
  void check(Verb verb, const char* function, int code, Address address = 0) const;  // raise_acl unless code is 0

  int (*get_device_count)(std::uint32_t*);
  int (*get_device)(std::int32_t*);
  int (*get_memory)(std::int32_t memory, std::size_t* free, std::size_t* total);
  int (*reserve)(void** address, std::size_t nbytes, std::size_t alignment, void* expected, std::uint64_t flags);
  int (*release)(void* address);
  int (*create)(AclHandle* handle, std::size_t nbytes, const AclPageKind* kind, std::uint64_t flags);
  int (*destroy)(AclHandle handle);
  int (*map)(void* address, std::size_t nbytes, std::size_t offset, AclHandle handle, std::uint64_t flags);
  int (*unmap)(void* address);

 private:
  Library library_;
  int (*init_)(const char* config);
  int (*set_device_)(std::int32_t);
  int (*get_granularity_)(const AclPageKind*, int option, std::size_t* nbytes);  // none before CANN 8.0
  const char* (*recent_error_)();                                                // of the calling thread
};

// Makes `device` the calling thread's device for a scope. A thread that had none keeps it: there is no way back, and a
// reset would take the device from the others of the process.
class AclThread {
 public:
  AclThread(const AclApi& api, int device);  // throws Error(info)
  AclThread(const AclThread&) = delete;
  AclThread& operator=(const AclThread&) = delete;
  ~AclThread();

 private:
  const AclApi& api_;
  const int device_;
  int before_ = -1;
};

}  // namespace xllm::vmm
