// The books of a driver: its handles, its reserved ranges, which handle is mapped at which address, and how many kernel
// mappings (VMAs) that takes. Makes no system call except reading the kernel's limit.
//
// INVARIANT. A run is a maximal series of mapped pages whose addresses and slots both rise by one; the kernel merges
//   it into one mapping. vmas = 2 · runs + ranges bounds from above what the kernel has: each run and one gap after it,
//   and the rest of each range. The kernel counts per process, so the sum over all address maps is kept, and beside it
//   how many mappings there are that no driver made: those are counted at the first charge and every 4096 of ours.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "driver.h"

namespace xllm::vmm {

inline std::uint32_t slot_of(Handle handle) { return static_cast<std::uint32_t>(handle >> 32); }

class AddressMap {
 public:
  // `vma_limit` bounds the whole process; 0 is 70 % of vm.max_map_count.
  AddressMap(std::size_t page_bytes, std::int64_t vma_limit);
  ~AddressMap() { clear(); }

  void add_range(Address address, std::size_t nbytes) { ranges_.emplace(address, nbytes); }
  void remove_range(Address address) { ranges_.erase(address); }
  void check_range(Verb verb, Address address, std::size_t nbytes) const;  // it is one and empty, else Error

  void add_handle(Handle handle) { handles_.emplace(handle, 0); }
  void remove_handle(Handle handle) { handles_.erase(handle); }
  void check_handle(Verb verb, Handle handle) const;            // it exists, else Error
  void check_idle(const std::vector<Handle>& sorted) const;     // they exist, once each, mapped nowhere; Error(destroy)
  void check_mapped(const std::vector<Address>& sorted) const;  // pages are mapped there, once each; Error(unmap)

  void insert(const Page& page);  // Error(map) unless the handle exists and the address is a free page of a range
  void erase(Address address);    // REQUIRES a page mapped there
  bool joined(Address low, Address high) const;  // both mapped, in adjacent slots

  // Brings the process-wide count up to date. charge throws Shortage when the limit would be passed; settle never
  // fails: taking a page away may split a run, which the other 30 % allow.
  void charge(Verb verb);
  void settle();

  const std::map<Address, std::size_t>& ranges() const { return ranges_; }
  const std::map<Address, Handle>& pages() const { return pages_; }
  std::size_t num_handles() const { return handles_.size(); }
  std::int64_t num_vmas() const { return charged_; }
  static std::int64_t process_vmas();
  void clear();

 private:
  std::int64_t wanted() const { return 2 * runs_ + static_cast<std::int64_t>(ranges_.size()); }

  const std::size_t page_bytes_;
  const std::int64_t vma_limit_;
  std::map<Address, std::size_t> ranges_;
  std::map<Address, Handle> pages_;
  std::unordered_map<Handle, std::uint32_t> handles_;  // → how many addresses it is mapped at
  std::int64_t runs_ = 0;
  std::int64_t charged_ = 0;  // our part of the process-wide count
};

}  // namespace xllm::vmm
