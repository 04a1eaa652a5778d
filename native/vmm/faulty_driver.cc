#include "faulty_driver.h"

#include <cerrno>

namespace xllm::vmm {
namespace {

[[noreturn]] void raise_planned(Verb verb, bool shortage, Address address) {
  if (shortage) throw Shortage(verb, ENOMEM, address, "planned shortage");
  throw Error(verb, EIO, address, "planned failure");
}

}  // namespace

FaultyDriver::FaultyDriver(std::shared_ptr<Driver> inner) : inner_(std::move(inner)) {}

void FaultyDriver::fail(Verb verb, std::uint64_t nth, bool shortage) {
  const std::lock_guard lock(mutex_);
  faults_[{verb, nth}] = shortage;
}

std::optional<FaultyDriver::Fault> FaultyDriver::next_fault(Verb verb, std::size_t pages) const {
  const std::lock_guard lock(mutex_);
  const std::uint64_t before = count_call(verb, pages);
  const auto found = faults_.upper_bound({verb, before});
  if (found == faults_.end() || found->first.first != verb || found->first.second > before + pages) return std::nullopt;
  const Fault fault{static_cast<std::size_t>(found->first.second - before - 1), found->second};
  faults_.erase(found);
  return fault;
}

Info FaultyDriver::info() const {
  if (const auto fault = next_fault(Verb::kInfo, 1)) raise_planned(Verb::kInfo, fault->shortage, 0);
  return inner_->info();
}

Address FaultyDriver::reserve(std::size_t nbytes) {
  if (const auto fault = next_fault(Verb::kReserve, 1)) raise_planned(Verb::kReserve, fault->shortage, 0);
  return inner_->reserve(nbytes);
}

void FaultyDriver::release(Address address, std::size_t nbytes) {
  if (const auto fault = next_fault(Verb::kRelease, 1)) raise_planned(Verb::kRelease, fault->shortage, address);
  inner_->release(address, nbytes);
}

std::vector<Handle> FaultyDriver::create(std::size_t count) {
  const auto fault = next_fault(Verb::kCreate, count);
  if (!fault) return inner_->create(count);
  inner_->destroy(inner_->create(fault->index));
  raise_planned(Verb::kCreate, fault->shortage, 0);
}

std::vector<Handle> FaultyDriver::destroy(std::vector<Handle> handles) {
  const auto fault = next_fault(Verb::kDestroy, handles.size());
  if (!fault) return inner_->destroy(std::move(handles));
  const Handle kept = handles[fault->index];
  note_failure(Verb::kDestroy, EIO, 0, "planned failure");
  handles.erase(handles.begin() + static_cast<std::ptrdiff_t>(fault->index));
  auto failed = inner_->destroy(std::move(handles));
  failed.push_back(kept);
  return failed;
}

void FaultyDriver::map(std::vector<Page> pages) {
  const auto fault = next_fault(Verb::kMap, pages.size());
  if (!fault) return inner_->map(std::move(pages));
  const Address failing = pages[fault->index].address;
  pages.resize(fault->index);
  std::vector<Address> done;
  for (const Page& page : pages) done.push_back(page.address);
  inner_->map(std::move(pages));
  inner_->unmap(std::move(done));
  raise_planned(Verb::kMap, fault->shortage, failing);
}

std::vector<Address> FaultyDriver::unmap(std::vector<Address> addresses) {
  const auto fault = next_fault(Verb::kUnmap, addresses.size());
  if (!fault) return inner_->unmap(std::move(addresses));
  const Address kept = addresses[fault->index];
  note_failure(Verb::kUnmap, EIO, kept, "planned failure");
  addresses.erase(addresses.begin() + static_cast<std::ptrdiff_t>(fault->index));
  auto failed = inner_->unmap(std::move(addresses));
  failed.push_back(kept);
  return failed;
}

Export FaultyDriver::export_handle(Handle handle) { return inner_->export_handle(handle); }
std::uint64_t FaultyDriver::memfd_bytes() const { return inner_->memfd_bytes(); }
std::map<std::string, std::uint64_t> FaultyDriver::usage() const { return inner_->usage(); }
std::string FaultyDriver::last_failure() const {
  const std::string planned = Driver::last_failure();
  return planned.empty() ? inner_->last_failure() : planned;
}
void FaultyDriver::close() { inner_->close(); }

}  // namespace xllm::vmm
