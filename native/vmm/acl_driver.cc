#include "acl_driver.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace xllm::vmm {
namespace {

constexpr std::size_t kLargestRange = std::size_t{128} << 30;  // a limit of the vendor's kernel driver, per reservation

void* pointer_to(Address address) { return reinterpret_cast<void*>(address); }  // NOLINT

AclPageKind page_kind(int device) { return {0, 0, kAclHbmHuge, {static_cast<std::uint32_t>(device), kAclOnDevice}, 0}; }

std::size_t page_size(const AclApi& api, const AclPageKind& kind, const AclOptions& options) {
  api.start();
  const std::size_t unit = api.granularity(kind);
  const std::size_t size = options.page_bytes.value_or(unit);
  if (size == 0 || size % unit != 0) {
    throw std::invalid_argument("page_bytes must be a positive multiple of " + std::to_string(unit) + ", not " +
                                std::to_string(size));
  }
  return size;
}

}  // namespace

AclDriver::AclDriver(const AclOptions& options)
    : options_(options),
      api_(options.library),
      kind_(page_kind(options.device)),
      page_bytes_(page_size(api_, kind_, options)),
      total_(memory().total),  // the first question binds this thread: a process does that before any page call
      addresses_(page_bytes_, 0) {}

AclDriver::~AclDriver() { close(); }

AclDriver::Memory AclDriver::memory() const {
  const AclThread bound(api_, options_.device);
  std::size_t free = 0, total = 0;
  api_.check(Verb::kInfo, "aclrtGetMemInfo", api_.get_memory(kAclHbm, &free, &total));
  if (options_.total_bytes == 0) return {total, free};
  const std::uint64_t owned = owned_;
  return {std::min<std::uint64_t>(total, options_.total_bytes),
          std::min<std::uint64_t>(free, options_.total_bytes - std::min(options_.total_bytes, owned))};
}

Info AclDriver::info() const {
  count_call(Verb::kInfo, 1);
  const Memory now = memory();
  return {"acl", "hbm", page_bytes_, now.total, now.free, true, kLargestRange};
}

void AclDriver::check_open(Verb verb) const {
  if (closed_) throw Error(verb, EBADF, 0, "the driver is closed");
}

Address AclDriver::reserve(std::size_t nbytes) {
  const std::lock_guard lock(mutex_);
  count_call(Verb::kReserve, 1);
  check_open(Verb::kReserve);
  if (nbytes == 0 || nbytes % page_bytes_ != 0) throw Error(Verb::kReserve, EINVAL, 0, "size is not in whole pages");
  if (nbytes > kLargestRange) {
    throw Error(Verb::kReserve, EINVAL, 0,
                std::to_string(nbytes) + " bytes in one range: this device reserves at most " +
                    std::to_string(kLargestRange) + ", and two ranges are not adjacent");
  }
  void* address = nullptr;
  api_.check(Verb::kReserve, "aclrtReserveMemAddress", api_.reserve(&address, nbytes, 0, nullptr, kAclReserveHuge));
  addresses_.add_range(reinterpret_cast<Address>(address), nbytes);
  return reinterpret_cast<Address>(address);
}

void AclDriver::release(Address address, std::size_t nbytes) {
  const std::lock_guard lock(mutex_);
  count_call(Verb::kRelease, 1);
  addresses_.check_range(Verb::kRelease, address, nbytes);
  settle_leftover();
  const auto stuck = leftover_.mapped.lower_bound(address);
  if (stuck != leftover_.mapped.end() && stuck->first < address + nbytes) {
    throw Error(Verb::kRelease, EBUSY, stuck->first, "a page that could not be unmapped is in the range");
  }
  api_.check(Verb::kRelease, "aclrtReleaseMemAddress", api_.release(pointer_to(address)), address);
  addresses_.remove_range(address);
}

void AclDriver::charge(std::size_t count) {
  const std::lock_guard lock(mutex_);
  check_open(Verb::kCreate);
  settle_leftover();
  const std::uint64_t most = options_.total_bytes != 0 ? std::min(options_.total_bytes, total_) : total_;
  if (count > most / page_bytes_ || owned_ + count * page_bytes_ > most) {
    throw Shortage(Verb::kCreate, ENOMEM, 0,
                   (options_.total_bytes != 0 ? "total_bytes: " : "the whole device: ") + std::to_string(count) +
                       " pages wanted, " + std::to_string(owned_) + " of " + std::to_string(most) + " bytes owned");
  }
  owned_ += count * page_bytes_;
}

void AclDriver::make(std::size_t count, std::vector<AclHandle>& made) const {
  made.reserve(count);
  const AclThread bound(api_, options_.device);
  while (made.size() < count) {
    AclHandle handle = nullptr;
    api_.check(Verb::kCreate, "aclrtMallocPhysical", api_.create(&handle, page_bytes_, &kind_, 0));
    made.push_back(handle);
  }
}

std::vector<Handle> AclDriver::create(std::size_t count) {
  count_call(Verb::kCreate, count);
  if (count == 0) return {};
  charge(count);
  std::vector<AclHandle> made;
  try {
    make(count, made);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    owned_ -= (count - made.size()) * page_bytes_;
    leftover_.handles.insert(leftover_.handles.end(), made.begin(), made.end());
    settle_leftover();
    throw;
  }
  const std::lock_guard lock(mutex_);
  std::vector<Handle> handles;
  for (const AclHandle vendor : made) {
    handles.push_back(next_handle_++);
    handles_.emplace(handles.back(), vendor);
    addresses_.add_handle(handles.back());
  }
  return handles;
}

bool AclDriver::give(AclHandle handle) {
  const int code = api_.destroy(handle);
  if (code != 0) note_failure(Verb::kDestroy, code, 0, api_.explain("aclrtFreePhysical", code));
  return code == 0;
}

std::vector<Handle> AclDriver::destroy(std::vector<Handle> handles) {
  const std::lock_guard lock(mutex_);
  count_call(Verb::kDestroy, handles.size());
  check_open(Verb::kDestroy);
  std::sort(handles.begin(), handles.end());
  addresses_.check_idle(handles);
  settle_leftover();
  std::vector<Handle> failed;
  for (const Handle handle : handles) {
    const bool stuck = std::any_of(leftover_.mapped.begin(), leftover_.mapped.end(),
                                   [handle](const auto& page) { return page.second == handle; });
    if (stuck || !give(handles_.at(handle))) {
      failed.push_back(handle);
      continue;
    }
    handles_.erase(handle);
    addresses_.remove_handle(handle);
    owned_ -= page_bytes_;
  }
  return failed;
}

bool AclDriver::take(Verb verb, Address address) {
  const int code = api_.unmap(pointer_to(address));
  if (code != 0) note_failure(verb, code, address, api_.explain("aclrtUnmapMem", code));
  return code == 0;
}

void AclDriver::put(const std::vector<Page>& pages) {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const auto& [address, handle] = pages[i];
    const int code = api_.map(pointer_to(address), page_bytes_, 0, handles_.at(handle), 0);
    if (code == 0) continue;
    // The vendor's text first: undoing may replace it.
    const std::string text = api_.explain("aclrtMapMem", code);
    while (i-- > 0) {
      if (!take(Verb::kMap, pages[i].address)) leftover_.mapped.emplace(pages[i].address, pages[i].handle);
    }
    raise_acl(Verb::kMap, code, address, text);
  }
}

void AclDriver::map(std::vector<Page> pages) {
  const std::lock_guard lock(mutex_);
  count_call(Verb::kMap, pages.size());
  check_open(Verb::kMap);
  settle_leftover();
  std::size_t inserted = 0;
  try {
    for (; inserted < pages.size(); ++inserted) {
      addresses_.insert(pages[inserted]);
      if (leftover_.mapped.contains(pages[inserted].address)) {
        ++inserted;
        throw Error(Verb::kMap, EBUSY, pages[inserted - 1].address, "a page that could not be unmapped is still here");
      }
    }
    put(pages);
  } catch (...) {
    while (inserted > 0) addresses_.erase(pages[--inserted].address);
    throw;
  }
}

std::vector<Address> AclDriver::unmap(std::vector<Address> addresses) {
  const std::lock_guard lock(mutex_);
  count_call(Verb::kUnmap, addresses.size());
  std::sort(addresses.begin(), addresses.end());
  addresses_.check_mapped(addresses);
  std::vector<Address> failed;
  for (const Address address : addresses) {
    if (take(Verb::kUnmap, address)) {
      addresses_.erase(address);
    } else {
      failed.push_back(address);
    }
  }
  return failed;
}

void AclDriver::settle_leftover() {
  std::erase_if(leftover_.mapped, [this](const auto& page) { return take(Verb::kMap, page.first); });
  owned_ -= std::erase_if(leftover_.handles, [this](AclHandle handle) { return give(handle); }) * page_bytes_;
}

Export AclDriver::export_handle(Handle handle) {
  const std::lock_guard lock(mutex_);
  addresses_.check_handle(Verb::kCreate, handle);
  throw Error(Verb::kCreate, kAclUnsupported, 0, "export is not supported: a page of this device has no descriptor");
}

std::uint64_t AclDriver::memfd_bytes() const { return owned_; }

std::map<std::string, std::uint64_t> AclDriver::usage() const {
  const std::lock_guard lock(mutex_);
  return {{"handles", handles_.size() + leftover_.handles.size()},
          {"mapped", addresses_.pages().size() + leftover_.mapped.size()},
          {"ranges", addresses_.ranges().size()},
          {"vmas", 0},  // device addresses take none of the process's mappings
          {"process_vmas", static_cast<std::uint64_t>(AddressMap::process_vmas())}};
}

void AclDriver::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  leftover_.mapped.insert(addresses_.pages().begin(), addresses_.pages().end());
  for (const auto& [handle, vendor] : handles_) leftover_.handles.push_back(vendor);
  handles_.clear();
  addresses_.clear();
  // A page that is stuck keeps its memory until the process ends; freeing its handle does no harm.
  settle_leftover();
}

AclProbe probe_acl(const std::string& library) {
  try {
    const AclApi api(library);
    api.start();
    std::uint32_t count = 0;
    const int code = api.get_device_count(&count);
    if (code != 0) return {0, api.explain("aclrtGetDeviceCount", code) + " (code " + std::to_string(code) + ")"};
    return {count, count == 0 ? "the runtime reports no device" : ""};
  } catch (const Error& error) {
    return {0, error.text + " (code " + std::to_string(error.code) + ")"};
  } catch (const std::runtime_error& error) {
    return {0, error.what()};
  }
}

}  // namespace xllm::vmm
