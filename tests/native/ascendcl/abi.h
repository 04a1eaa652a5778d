// The part of the ACL ABI that the emulator speaks: types, values and error codes, declared anew from the documented
// layout. Knows no behaviour. Sizes and offsets are asserted: a slip is a build error and not a wrong device id.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ascendcl {

// --- error codes: which layer says them is in the comment
enum Code : int {
  kSuccess = 0,
  kBadArgument = 100000,         // ACL layer: null, zero size, flags, unknown enum
  kNotInitialised = 100001,      // ACL layer: aclInit has not run
  kRepeatInitialise = 100002,    // ACL layer: aclInit ran before; callers treat it as success
  kInvalidValue = 107000,        // runtime: alignment, offset, reserve field, freed too often, not a reserved address
  kBadDevice = 107001,           // runtime
  kNoContext = 107002,           // runtime: aclrtSetDevice has not run in this thread
  kBadHandle = 107017,           // runtime: unknown handle, or no device was ever opened by the process
  kTimeout = 107020,             // runtime: the wait ran out
  kStreamUnjoined = 107025,      // runtime: capture ends while a joined stream is still apart
  kStreamCaptured = 107027,      // runtime: this stream is being captured
  kStreamNotCaptured = 107029,   // runtime: this stream is not
  kCaptureForbids = 107030,      // runtime: the call is not allowed while capturing
  kTaskGroupStatus = 107033,     // runtime: task group begun, ended or updated out of turn
  kCaptureUnmatched = 107036,    // runtime: capture was begun on another stream
  kCaptureWrongThread = 107038,  // runtime
  kNotSupported = 207000,        // runtime: old driver, unknown option
  kOutOfMemory = 207001,         // physical memory or address space; the only code to retry after freeing
  kNoOperator = 500001,          // GE: what the emulator says for every operator it does not have
  kDeviceFault = 507015,         // AI core: asynchronous, seen at the next synchronise; the context is lost
  kDriverError = 507899,         // driver: every EINVAL, EADDRINUSE and EBUSY of the kernel
};

// --- physical memory
struct Location {
  std::uint32_t id;   // NB the id comes first
  std::int32_t type;  // LocationType
};
static_assert(sizeof(Location) == 8);

enum LocationType : std::int32_t { kHost = 0, kDevice = 1, kHostNuma = 4 };

struct PhysicalProperties {
  std::int32_t handle_type;      // 0
  std::int32_t allocation_type;  // 0: pinned
  std::int32_t attribute;        // MemoryAttribute
  Location location;
  std::uint64_t reserve;  // 0
};
static_assert(sizeof(PhysicalProperties) == 32 && offsetof(PhysicalProperties, location) == 12 &&
              offsetof(PhysicalProperties, reserve) == 24);

enum MemoryAttribute : std::int32_t {
  kHbm = 1,
  kDdrHuge = 2,
  kDdrNormal = 3,
  kHbmHuge = 4,
  kHbmNormal = 5,
  kHbmHuge1G = 10,
  kHbmP2pHuge1G = 11,
  kMemNormal = 12,
  kMemHuge1G = 14,
  kMemP2pHuge1G = 17,  // the last known
};

struct AccessDescription {
  std::int32_t flags;  // 0 none, 1 read, 3 read and write
  Location location;
  std::uint8_t reserved[12];
};
static_assert(sizeof(AccessDescription) == 24);

struct PointerAttributes {
  Location location;
  std::uint32_t page_size;
  std::uint32_t reserved[4];
};
static_assert(sizeof(PointerAttributes) == 28);

enum ShareableType : int { kShareableDefault = 1, kShareableFabric = 2 };
enum AccessFlags : std::int32_t { kAccessReadWrite = 3 };
enum Granularity : int { kGranularityMinimum = 0, kGranularityRecommended = 1 };
enum CopyKind : int { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3, kCopyDefault = 4 };

// --- streams and events
enum StreamStatus : int { kStreamComplete = 0, kStreamNotReady = 1 };
enum RecordedStatus : int { kRecordNotReady = 0, kRecordComplete = 1 };
enum WaitStatus : int { kWaitComplete = 0, kWaitNotReady = 1 };
enum CaptureMode : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };
enum CaptureStatus : int { kCaptureNone = 0, kCaptureActive = 1, kCaptureInvalidated = 2 };

inline std::uint64_t address_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
inline constexpr std::uint64_t kPage = 2 * kMiB;

}  // namespace ascendcl

// The names the library exports, and nothing else.
#define ASCENDCL_API extern "C" __attribute__((visibility("default")))
