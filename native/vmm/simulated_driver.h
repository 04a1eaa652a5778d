// An accelerator of a chosen size over another driver's memory, for tests and experiments: what others hold of it is
// told here instead of happening.
//
//   total = pages of the pool + outside + peer + free
//     outside   what this process holds beside the pool: an allocator's segments, buffers of an SDK
//     peer      what other processes hold
//
// before(verb, n, bytes) is the script of a peer: just before the n-th call of that verb from now on it takes that many
// bytes, or all there are; a negative number gives back. So a peer can strike between a check and the call it was for.
#pragma once

#include <memory>
#include <mutex>

#include "driver.h"

namespace xllm::vmm {

class SimulatedDriver final : public Driver {
 public:
  SimulatedDriver(std::shared_ptr<Driver> inner, std::uint64_t total_bytes);

  bool take(std::uint64_t nbytes);  // outside the pool; false: not so much is free, nothing changed
  void give(std::uint64_t nbytes);  // outside the pool
  std::uint64_t outside() const;
  void set_peer(std::uint64_t nbytes);  // as much of it as is free
  std::uint64_t peer() const;
  void before(Verb verb, std::uint64_t nth, std::int64_t peer_bytes);

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
  std::string last_failure() const override { return inner_->last_failure(); }
  void close() override;

 private:
  struct Event {
    Verb verb;
    std::uint64_t calls_left;
    std::int64_t peer_bytes;
  };

  std::uint64_t free_bytes() const { return total_ - owned_ - outside_ - peer_; }
  void move_peer(std::int64_t nbytes);
  void call(Verb verb, std::uint64_t pages);  // counts it and plays what is due

  const std::shared_ptr<Driver> inner_;
  const std::uint64_t total_;
  const std::size_t page_bytes_;

  mutable std::mutex mutex_;  // guards what follows: owned_ + outside_ + peer_ <= total_
  std::uint64_t owned_ = 0, outside_ = 0, peer_ = 0;
  std::vector<Event> script_;
};

}  // namespace xllm::vmm
