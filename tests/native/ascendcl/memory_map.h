// What lies where in the device window: reservations, handles, mappings and blocks of aclrtMalloc, and who reads them
// now. Enforces the rules of mapping; knows no streams and checks no argument a layer above can check.
//
// THREADS. One mutex, `lock()`; every function below wants it held.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "abi.h"
#include "registry.h"
#include "virtual_space.h"

namespace ascendcl {

// Physical memory: a piece of one sparse file, so that two mappings of one handle are the same bytes.
struct Physical {
  std::uint64_t nbytes;
  std::uint64_t page_bytes = kPage;
  int device;            // -1: host side
  std::uint64_t offset;  // in the file
  int file;              // of an importing process: the exporter's; else the process's own
  int owners = 1;        // FreePhysical calls still due
  int maps = 0;
  bool imported = false;
  bool exported = false;
  bool lost = false;  // its reservation was released under it: the memory stays taken until the process ends
  bool is_alive() const { return owners > 0 || maps > 0; }
};

struct Reservation {
  std::uint64_t nbytes;           // as asked for, in whole pages
  std::uint64_t space;            // as taken from the window
  std::optional<int> side;        // pinned by the first map, for good
  std::optional<bool> imported;   // local and imported handles are not mixed
};

// A mapped range: a handle at an address, or a block of aclrtMalloc.
struct Extent {
  std::uint64_t nbytes;
  int device;
  std::shared_ptr<Physical> physical;  // null: a block
  void* handle;
  std::uint64_t reservation;
  bool accessible;
  int readers = 0;  // copies and kernels that run on it now
};

struct Span {
  std::uint64_t address, nbytes;
};

class MemoryMap {
 public:
  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }

  std::uint64_t reserve(std::uint64_t nbytes);
  void release(std::uint64_t address);

  void* create(std::uint64_t nbytes, std::uint64_t page_bytes, int device);
  void* adopt(std::shared_ptr<Physical> physical);  // an imported handle
  void destroy(void* handle);
  void* retain(std::uint64_t address);
  std::shared_ptr<Physical> owned(const void* handle) const;  // or a violation: stale, freed or unknown

  void map(std::uint64_t address, std::uint64_t nbytes, void* handle, bool accessible);
  void unmap(std::uint64_t address);
  void set_access(std::uint64_t address, std::uint64_t nbytes);

  std::uint64_t allocate(std::uint64_t nbytes, int device);
  void free_block(std::uint64_t address);

  // "" if every byte of the span is mapped and accessible or lies outside the window, else what is missing.
  std::string missing(const Span& span) const;
  void change_readers(const std::vector<Span>& spans, int change);
  const std::pair<const std::uint64_t, Extent>* find(std::uint64_t address) const;  // the extent over an address

  const std::map<std::uint64_t, Reservation>& reservations() const { return reservations_; }
  const std::map<std::uint64_t, Extent>& extents() const { return extents_; }
  const Registry<Physical>& handles() const { return handles_; }

 private:
  Extent& exact(std::uint64_t address, const char* rule);
  void check_free(std::uint64_t address, std::uint64_t nbytes) const;
  void drop(Physical& physical, const void* handle);

  std::mutex mutex_;
  VirtualSpace space_;
  Registry<Physical> handles_{1};
  std::map<std::uint64_t, Reservation> reservations_;
  std::map<std::uint64_t, Extent> extents_;
};

MemoryMap& memory_map();

}  // namespace ascendcl
