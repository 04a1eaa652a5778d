#include "simulated_driver.h"

#include <algorithm>
#include <cerrno>

namespace xllm::vmm {

SimulatedDriver::SimulatedDriver(std::shared_ptr<Driver> inner, std::uint64_t total_bytes)
    : inner_(std::move(inner)), total_(total_bytes), page_bytes_(inner_->info().page_bytes) {}

bool SimulatedDriver::take(std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  if (nbytes > free_bytes()) return false;
  outside_ += nbytes;
  return true;
}

void SimulatedDriver::give(std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  if (nbytes > outside_) throw std::invalid_argument("more is given back than was taken outside the pool");
  outside_ -= nbytes;
}

std::uint64_t SimulatedDriver::outside() const {
  const std::lock_guard lock(mutex_);
  return outside_;
}

void SimulatedDriver::set_peer(std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  peer_ = 0;
  peer_ = std::min(nbytes, free_bytes());
}

std::uint64_t SimulatedDriver::peer() const {
  const std::lock_guard lock(mutex_);
  return peer_;
}

void SimulatedDriver::before(Verb verb, std::uint64_t nth, std::int64_t peer_bytes) {
  if (nth == 0) throw std::invalid_argument("calls are counted from 1");
  const std::lock_guard lock(mutex_);
  script_.push_back({verb, nth, peer_bytes});
}

void SimulatedDriver::move_peer(std::int64_t nbytes) {
  if (nbytes < 0) {
    peer_ -= std::min(peer_, std::uint64_t{0} - static_cast<std::uint64_t>(nbytes));
  } else {
    peer_ += std::min(free_bytes(), static_cast<std::uint64_t>(nbytes));
  }
}

void SimulatedDriver::call(Verb verb, std::uint64_t pages) {
  count_call(verb, pages);
  const std::lock_guard lock(mutex_);
  for (Event& event : script_) {
    if (event.verb == verb && --event.calls_left == 0) move_peer(event.peer_bytes);
  }
  script_.erase(
      std::remove_if(script_.begin(), script_.end(), [](const Event& event) { return event.calls_left == 0; }),
      script_.end());
}

Info SimulatedDriver::info() const {
  Info info = inner_->info();
  const std::lock_guard lock(mutex_);
  info.name = "simulated";
  info.total = total_;
  info.free = free_bytes();
  return info;
}

Address SimulatedDriver::reserve(std::size_t nbytes) {
  call(Verb::kReserve, 1);
  return inner_->reserve(nbytes);
}

void SimulatedDriver::release(Address address, std::size_t nbytes) {
  call(Verb::kRelease, 1);
  inner_->release(address, nbytes);
}

std::vector<Handle> SimulatedDriver::create(std::size_t count) {
  call(Verb::kCreate, count);
  const std::uint64_t need = std::uint64_t{count} * page_bytes_;
  {
    const std::lock_guard lock(mutex_);
    if (count > total_ / page_bytes_ || need > free_bytes()) {
      throw Shortage(Verb::kCreate, ENOMEM, 0,
                     "simulated device: " + std::to_string(count) + " pages of " + std::to_string(page_bytes_) +
                         " bytes wanted, " + std::to_string(free_bytes()) + " bytes of " + std::to_string(total_) +
                         " free");
    }
    owned_ += need;
  }
  try {
    return inner_->create(count);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    owned_ -= need;
    throw;
  }
}

std::vector<Handle> SimulatedDriver::destroy(std::vector<Handle> handles) {
  call(Verb::kDestroy, handles.size());
  const std::size_t count = handles.size();
  std::vector<Handle> failed = inner_->destroy(std::move(handles));
  const std::lock_guard lock(mutex_);
  owned_ -= (count - failed.size()) * page_bytes_;
  return failed;
}

void SimulatedDriver::map(std::vector<Page> pages) {
  call(Verb::kMap, pages.size());
  inner_->map(std::move(pages));
}

std::vector<Address> SimulatedDriver::unmap(std::vector<Address> addresses) {
  call(Verb::kUnmap, addresses.size());
  return inner_->unmap(std::move(addresses));
}

Export SimulatedDriver::export_handle(Handle handle) { return inner_->export_handle(handle); }

std::uint64_t SimulatedDriver::memfd_bytes() const { return inner_->memfd_bytes(); }

std::map<std::string, std::uint64_t> SimulatedDriver::usage() const { return inner_->usage(); }

void SimulatedDriver::close() {
  inner_->close();
  const std::lock_guard lock(mutex_);
  owned_ = 0;
  script_.clear();
}

}  // namespace xllm::vmm
