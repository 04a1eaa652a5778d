// Host memory as a device: one sparse memfd holds every page, a handle is a slot of that file.
//
//   memfd   | slot 0 | slot 1 |  hole  | slot 3 |  hole …        fallocate(PUNCH_HOLE) gives a slot back to the system
//               \         \                /
//   range   [ page 0 | PROT_NONE | page 2 | page 3 | PROT_NONE ]  mmap(MAP_SHARED | MAP_FIXED) over a PROT_NONE reserve
//
// Mode huge: a slot is made of 2 MiB kernel pages: one 4 KiB page is populated through a staging window, then
// MADV_COLLAPSE turns the range into huge pages. Such an allocation never invokes the OOM killer, so that running out
// of memory is an errno. Mode 4k: fallocate; out of memory can be a SIGKILL, hence create first reads how much is free
// and leaves a floor.
//
// VMA BUDGET. The kernel limits mappings per process (vm.max_map_count), and at the limit malloc fails too. All drivers
// of the process together with whatever else is mapped use at most 70 % of it; beyond that map and reserve are a Shortage
// (address_map.h has the sum).
#pragma once

#include <mutex>
#include <optional>

#include "address_map.h"
#include "driver.h"
#include "host_memory.h"
#include "host_pages.h"
#include "slots.h"

namespace xllm::vmm {

struct HostOptions {
  bool huge = true;
  std::size_t page_bytes = 2 << 20;    // huge: multiple of 2 MiB; else multiple of the system's page
  std::uint64_t total_bytes = 0;       // cap on this driver's pages and on info().total; 0: none
  std::optional<std::uint8_t> poison;  // fresh pages are filled with this byte; none: zeros
  std::int64_t vma_limit = 0;          // 0: 70 % of vm.max_map_count
};

class HostDriver : public Driver {
 public:
  explicit HostDriver(const HostOptions& options);
  ~HostDriver() override;

  Info info() const override;
  Address reserve(std::size_t nbytes) override;
  void release(Address address, std::size_t nbytes) override;
  std::vector<Handle> create(std::size_t count) override;
  std::vector<Handle> destroy(std::vector<Handle> handles) override;
  void map(std::vector<Page> pages) override;
  std::vector<Address> unmap(std::vector<Address> addresses) override;
  Export export_handle(Handle handle) override;
  std::uint64_t memfd_bytes() const override;
  std::map<std::string, std::uint64_t> usage() const override;
  void close() override;

 private:
  std::uint64_t offset_of(Handle handle) const { return std::uint64_t{slot_of(handle)} * options_.page_bytes; }
  void check_open(Verb verb) const;
  void check_room(std::size_t count) const;
  void back(const std::vector<std::uint32_t>& slots);
  std::vector<std::uint32_t> punch(const std::vector<std::uint32_t>& slots);
  void put_pages(const std::vector<Page>& pages);

  const HostOptions options_;
  const HostMemory memory_;
  const std::uint32_t num_slots_;
  Fd file_;
  std::atomic<std::uint64_t> owned_{0};  // bytes of handles, and of those being created

  mutable std::mutex mutex_;  // guards everything below; never held while a page is created
  SpareMapping spare_;
  Slots slots_;
  std::uint32_t next_serial_ = 1;
  AddressMap addresses_;
};

}  // namespace xllm::vmm
