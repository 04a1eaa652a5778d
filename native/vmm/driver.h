// The seam between the server and the memory of a device. Pure C++: knows no Python, no tensors, no policy.
//
// A driver hands out address ranges (reserve) and physical pages (create), and puts pages into ranges (map).
//
// REQUIRES, for every driver; a caller that breaks one gets Error(EINVAL or EBUSY) and nothing has changed:
//   * sizes are multiples of info().page_bytes; addresses lie at a page boundary of a reserved range;
//   * map: the address is free; unmap: it is mapped; destroy: the handle is mapped nowhere;
//   * reserve: at most info().max_reserve_bytes; release: the very range that reserve returned, with no page mapped in it;
//   * no address and no handle appears twice in a batch (map may repeat a handle where info().can_alias).
// REQUIRES, and no driver can check it: unmap and destroy: no work of the device, running or queued, touches the page. A
//   driver knows no streams and waits for none; on acl a kernel that meets an unmapped page loses the whole context.
//   The caller fences first (worker/kv_store.py).
//
// OUTCOMES. Shortage: out of pages, memory or address-space entries; an expected miss, try again later. Error: the
//   device or the caller is at fault. create and map are all or nothing: on failure everything they did is undone.
//   unmap and destroy do as much as they can and return what failed; that stays as it was (mapped, or a valid handle).
//   A driver never aborts the process and never writes to stdout or stderr.
//
// OWNERSHIP. The driver owns ranges, handles and mappings. Contents move with the handle: unmap and map elsewhere
//   keep the bytes. Fresh pages hold anything (host: zeros, or the poison byte). Once close() ran, ranges never
//   released stay reserved, without memory, so that no view can ever see somebody else's memory.
//
// THREADS. create may run on several threads at once; other verbs on one thread at a time; info, counts, usage and
//   memfd_bytes on any thread at any time. No driver calls back and no driver owns a thread.
//
// FORK. Mapped pages are shared writable with a forked child. Children must be started by exec; descriptors are
//   close-on-exec. Core dumps include the pages unless bit 1 of /proc/self/coredump_filter is cleared (0x31).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace xllm::vmm {

using Address = std::uintptr_t;
using Handle = std::uint64_t;  // never 0; not reused soon after destroy; sorts by place in the memory

enum class Verb : std::uint8_t { kReserve, kRelease, kCreate, kDestroy, kMap, kUnmap, kInfo };
inline constexpr std::array<const char*, 7> kVerbNames{"reserve", "release", "create", "destroy",
                                                       "map",     "unmap",   "info"};

const char* verb_name(Verb verb);
Verb verb_from_name(const std::string& name);  // throws std::invalid_argument

// A failed verb. `code` is the vendor's (on the host, and where a driver itself refuses: errno); `address` 0 where none
// applies.
class Error : public std::runtime_error {
 public:
  Error(Verb verb, int code, Address address, std::string text);
  Verb verb;
  int code;
  Address address;
  std::string text;
};

class Shortage : public Error {
 public:
  using Error::Error;
};

inline constexpr std::size_t kNoLargestRange = std::numeric_limits<std::size_t>::max();

struct Info {
  std::string name;               // "host", "acl"
  std::string mode;               // host: "huge", "4k"; acl: "hbm"
  std::size_t page_bytes;         // the mapping unit
  std::uint64_t total;            // bytes of the device, the smallest limit that applies
  std::uint64_t free;             // bytes that could be created now; a fresh reading, advisory
  bool can_alias;                 // one handle may be mapped at several addresses
  std::size_t max_reserve_bytes;  // the largest range; kNoLargestRange: as large as there are addresses
};

struct Page {
  Address address;
  Handle handle;
};

struct Export {
  int fd;  // the caller's to close
  std::uint64_t offset;
  std::size_t nbytes;
};

class Driver {
 public:
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  virtual ~Driver() = default;

  virtual Info info() const = 0;
  virtual Address reserve(std::size_t nbytes) = 0;
  virtual void release(Address address, std::size_t nbytes) = 0;
  virtual std::vector<Handle> create(std::size_t count) = 0;
  virtual std::vector<Handle> destroy(std::vector<Handle> handles) = 0;
  virtual void map(std::vector<Page> pages) = 0;
  virtual std::vector<Address> unmap(std::vector<Address> addresses) = 0;
  virtual Export export_handle(Handle handle) = 0;  // Error(create) where pages have no descriptor
  virtual std::uint64_t memfd_bytes() const = 0;    // physical bytes, as the kernel counts them where it can be asked
  // Now: handles, mapped, ranges, and kernel mappings of this driver (vmas) and of all (process_vmas).
  virtual std::map<std::string, std::uint64_t> usage() const = 0;
  virtual void close() = 0;  // idempotent; all pages are gone afterwards

  std::map<std::string, std::uint64_t> counts() const;  // since reset_counts: calls ("map") and pages ("map_pages")
  void reset_counts();
  // Why the last page that unmap or destroy returned as failed did fail; empty: none did.
  virtual std::string last_failure() const;

 protected:
  // Notes a call; returns how many pages of this verb were counted before it.
  std::uint64_t count_call(Verb verb, std::uint64_t pages) const;
  void note_failure(Verb verb, int code, Address address, const std::string& text);

 private:
  mutable std::array<std::atomic<std::uint64_t>, kVerbNames.size()> calls_{};
  mutable std::array<std::atomic<std::uint64_t>, kVerbNames.size()> pages_{};
  mutable std::mutex failure_mutex_;
  std::string failure_;
};

}  // namespace xllm::vmm
