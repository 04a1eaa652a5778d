// A driver that fails on purpose: the adversary of everything built on the seam.
//
// It forwards to another driver and counts PAGES per verb (reserve, release and info count as one each). fail(verb, n) makes
// the n-th page of that verb, counted from 1 since reset_counts(), fail once:
//   reserve, release, info   throws before anything happened
//   create, map              the pages before it in the batch are really done, then undone, then Error or Shortage is thrown
//   unmap, destroy           every other page of the batch is done, this one is returned as failed (still mapped / valid)
// so a batch of k pages has k different ways to fail.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "driver.h"

namespace xllm::vmm {

class FaultyDriver final : public Driver {
 public:
  explicit FaultyDriver(std::shared_ptr<Driver> inner);

  // Several failures may be pending. `shortage` chooses what create, map and reserve throw.
  void fail(Verb verb, std::uint64_t nth, bool shortage);

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
  std::string last_failure() const override;
  void close() override;

 private:
  struct Fault {
    std::size_t index;  // position in the batch
    bool shortage;
  };

  // The planned failure that falls into the next `pages` pages of `verb`, which it uses up; counts the call.
  std::optional<Fault> next_fault(Verb verb, std::size_t pages) const;

  std::shared_ptr<Driver> inner_;
  mutable std::mutex mutex_;
  mutable std::map<std::pair<Verb, std::uint64_t>, bool> faults_;  // (verb, nth) → shortage
};

}  // namespace xllm::vmm
