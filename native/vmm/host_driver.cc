#include "host_driver.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace xllm::vmm {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kHugeMargin = 32 * kMiB;  // for the seed pages and page tables, which do use the OOM killer
constexpr std::uint64_t kSmallMargin = 64 * kMiB;

std::uint64_t floor_bytes(std::uint64_t total) { return std::max(64 * kMiB, total / 100); }

HostOptions checked(HostOptions options) {
  const std::size_t unit = options.huge ? kHugePage : static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (options.page_bytes == 0 || options.page_bytes % unit != 0) {
    throw std::invalid_argument("page_bytes must be a positive multiple of " + std::to_string(unit) + ", not " +
                                std::to_string(options.page_bytes));
  }
  return options;
}

// Offsets are virtual: four times the pages there can be leaves room to find adjacent slots.
std::uint32_t slot_count(const HostOptions& options, std::uint64_t total) {
  const std::uint64_t most = options.total_bytes ? std::min(options.total_bytes, total) : total;
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(most / options.page_bytes * 4, 64, 1U << 30));
}

}  // namespace

HostDriver::HostDriver(const HostOptions& options)
    : options_(checked(options)),
      num_slots_(slot_count(options_, memory_.read().total)),
      file_(make_sparse_file(std::uint64_t{num_slots_} * options_.page_bytes)),
      slots_(num_slots_),
      addresses_(options_.page_bytes, options_.vma_limit) {}

HostDriver::~HostDriver() { close(); }

Info HostDriver::info() const {
  count_call(Verb::kInfo, 1);
  MemoryReading reading = memory_.read();
  if (options_.total_bytes != 0) {
    const std::uint64_t owned = owned_;
    reading.total = std::min(reading.total, options_.total_bytes);
    reading.free = std::min(reading.free, options_.total_bytes - std::min(options_.total_bytes, owned));
  }
  const char* const mode = options_.huge ? "huge" : "4k";
  return {"host", mode, options_.page_bytes, reading.total, reading.free, true, kNoLargestRange};
}

void HostDriver::check_open(Verb verb) const {
  if (!file_) throw Error(verb, EBADF, 0, "the driver is closed");
}

Address HostDriver::reserve(std::size_t nbytes) {
  const std::lock_guard lock(mutex_);
  count_call(Verb::kReserve, 1);
  check_open(Verb::kReserve);
  if (nbytes == 0 || nbytes % options_.page_bytes) throw Error(Verb::kReserve, EINVAL, 0, "size is not in whole pages");
  const Address address = reserve_space(nbytes, kHugePage);
  if (address == 0) throw Shortage(Verb::kReserve, errno, 0, std::string("address space: ") + std::strerror(errno));
  addresses_.add_range(address, nbytes);
  try {
    addresses_.charge(Verb::kReserve);
  } catch (const Shortage&) {
    addresses_.remove_range(address);
    release_space(address, nbytes);
    throw;
  }
  return address;
}

void HostDriver::release(Address address, std::size_t nbytes) {
  const std::lock_guard lock(mutex_);
  count_call(Verb::kRelease, 1);
  addresses_.check_range(Verb::kRelease, address, nbytes);
  if (const int code = release_space(address, nbytes)) throw Error(Verb::kRelease, code, address, std::strerror(code));
  addresses_.remove_range(address);
  addresses_.settle();
}

void HostDriver::check_room(std::size_t count) const {
  const std::uint64_t need = count * options_.page_bytes;
  const MemoryReading reading = memory_.read();
  const std::uint64_t margin = options_.huge ? kHugeMargin : floor_bytes(reading.total) + kSmallMargin;
  if (reading.free < need + margin) {
    throw Shortage(Verb::kCreate, ENOMEM, 0,
                   "host memory: " + std::to_string(need) + " bytes wanted, " + std::to_string(reading.free) +
                       " free, " + std::to_string(margin) + " of them kept");
  }
}

void HostDriver::back(const std::vector<std::uint32_t>& slots) {
  const auto has_room = [this](std::size_t nbytes) {
    const MemoryReading reading = memory_.read();
    return reading.free >= nbytes + floor_bytes(reading.total) + kSmallMargin;
  };
  for_each_extent(slots, options_.page_bytes, [&](Extent extent, std::size_t, std::size_t) {
    if (options_.huge) {
      back_huge(file_.get(), extent, has_room);
    } else {
      back_small(file_.get(), extent);
    }
    if (options_.poison) fill(file_.get(), extent, *options_.poison);
  });
}

std::vector<std::uint32_t> HostDriver::punch(const std::vector<std::uint32_t>& slots) {
  std::vector<std::uint32_t> kept;
  for_each_extent(slots, options_.page_bytes, [&](Extent extent, std::size_t first, std::size_t last) {
    const int code = punch_hole(file_.get(), extent);
    if (code == 0) return;
    note_failure(Verb::kDestroy, code, 0, std::strerror(code));
    kept.insert(kept.end(), slots.begin() + static_cast<std::ptrdiff_t>(first),
                slots.begin() + static_cast<std::ptrdiff_t>(last));
  });
  return kept;
}

std::vector<Handle> HostDriver::create(std::size_t count) {
  count_call(Verb::kCreate, count);
  if (count == 0) return {};
  if (count > num_slots_) throw Shortage(Verb::kCreate, ENOSPC, 0, "more pages wanted than there can ever be");
  const std::uint64_t need = count * options_.page_bytes;
  std::vector<std::uint32_t> slots;
  {
    const std::lock_guard lock(mutex_);
    check_open(Verb::kCreate);
    if (options_.total_bytes != 0 && owned_ + need > options_.total_bytes) {
      throw Shortage(Verb::kCreate, ENOMEM, 0,
                     "total_bytes: " + std::to_string(need) + " bytes wanted, " + std::to_string(owned_) + " of " +
                         std::to_string(options_.total_bytes) + " owned");
    }
    check_room(count);
    slots = slots_.take(count);
    if (slots.empty()) throw Shortage(Verb::kCreate, ENOSPC, 0, "the memory file has no free slots");
    owned_ += need;
  }
  try {
    back(slots);
  } catch (...) {
    // A slot that cannot be punched would be found half backed by its next user, who punches or fills it all the same.
    punch(slots);
    const std::lock_guard lock(mutex_);
    for (const std::uint32_t slot : slots) slots_.give(slot);
    owned_ -= need;
    throw;
  }
  const std::lock_guard lock(mutex_);
  std::vector<Handle> handles;
  for (const std::uint32_t slot : slots) {
    if (next_serial_ == 0) next_serial_ = 1;
    handles.push_back(Handle{slot} << 32 | next_serial_++);
    addresses_.add_handle(handles.back());
  }
  return handles;
}

std::vector<Handle> HostDriver::destroy(std::vector<Handle> handles) {
  const std::lock_guard lock(mutex_);
  count_call(Verb::kDestroy, handles.size());
  check_open(Verb::kDestroy);
  std::sort(handles.begin(), handles.end());
  addresses_.check_idle(handles);
  std::vector<std::uint32_t> slots;
  for (const Handle handle : handles) slots.push_back(slot_of(handle));
  const std::vector<std::uint32_t> kept = punch(slots);
  std::vector<Handle> failed;
  for (const Handle handle : handles) {
    const auto slot = slot_of(handle);
    if (std::binary_search(kept.begin(), kept.end(), slot)) {
      failed.push_back(handle);
      continue;
    }
    addresses_.remove_handle(handle);
    slots_.give(slot);
    owned_ -= options_.page_bytes;
  }
  return failed;
}

void HostDriver::put_pages(const std::vector<Page>& pages) {
  for (std::size_t first = 0, last; first < pages.size(); first = last) {
    for (last = first + 1; last < pages.size() &&
                           pages[last].address == pages[last - 1].address + options_.page_bytes &&
                           addresses_.joined(pages[last - 1].address, pages[last].address);) {
      ++last;
    }
    const Extent extent{offset_of(pages[first].handle), (last - first) * options_.page_bytes};
    const int code = put_extent(file_.get(), extent, pages[first].address, options_.huge);
    if (code == 0) continue;
    for (std::size_t i = 0; i < last; ++i) spare_.cover(pages[i].address, options_.page_bytes);
    if (code == ENOMEM) throw Shortage(Verb::kMap, code, pages[first].address, std::strerror(code));
    throw Error(Verb::kMap, code, pages[first].address, std::strerror(code));
  }
}

void HostDriver::map(std::vector<Page> pages) {
  const std::lock_guard lock(mutex_);
  count_call(Verb::kMap, pages.size());
  check_open(Verb::kMap);
  std::sort(pages.begin(), pages.end(), [](const Page& a, const Page& b) { return a.address < b.address; });
  std::size_t inserted = 0;
  try {
    for (; inserted < pages.size(); ++inserted) addresses_.insert(pages[inserted]);
    addresses_.charge(Verb::kMap);
    put_pages(pages);
  } catch (...) {
    while (inserted > 0) addresses_.erase(pages[--inserted].address);
    addresses_.settle();
    throw;
  }
}

std::vector<Address> HostDriver::unmap(std::vector<Address> addresses) {
  const std::lock_guard lock(mutex_);
  count_call(Verb::kUnmap, addresses.size());
  std::sort(addresses.begin(), addresses.end());
  addresses_.check_mapped(addresses);
  std::vector<Address> failed;
  for (std::size_t first = 0, last; first < addresses.size(); first = last) {
    for (last = first + 1; last < addresses.size() && addresses[last] == addresses[last - 1] + options_.page_bytes;)
      ++last;
    const int code = spare_.cover(addresses[first], (last - first) * options_.page_bytes);
    if (code != 0) note_failure(Verb::kUnmap, code, addresses[first], std::strerror(code));
    for (std::size_t i = first; i < last; ++i) {
      if (code == 0) {
        addresses_.erase(addresses[i]);
      } else {
        failed.push_back(addresses[i]);
      }
    }
  }
  addresses_.settle();
  return failed;
}

Export HostDriver::export_handle(Handle handle) {
  const std::lock_guard lock(mutex_);
  addresses_.check_handle(Verb::kCreate, handle);
  const int fd = ::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) throw Error(Verb::kCreate, errno, 0, std::string("duplicate the memory file: ") + std::strerror(errno));
  return {fd, offset_of(handle), options_.page_bytes};
}

std::uint64_t HostDriver::memfd_bytes() const {
  const std::lock_guard lock(mutex_);
  struct stat status{};
  if (!file_ || ::fstat(file_.get(), &status) != 0) return 0;
  return static_cast<std::uint64_t>(status.st_blocks) * 512;
}

std::map<std::string, std::uint64_t> HostDriver::usage() const {
  const std::lock_guard lock(mutex_);
  return {{"handles", addresses_.num_handles()},
          {"mapped", addresses_.pages().size()},
          {"ranges", addresses_.ranges().size()},
          {"vmas", static_cast<std::uint64_t>(addresses_.num_vmas())},
          {"process_vmas", static_cast<std::uint64_t>(AddressMap::process_vmas())}};
}

void HostDriver::close() {
  const std::lock_guard lock(mutex_);
  for (const auto& [address, nbytes] : addresses_.ranges()) spare_.cover(address, nbytes);
  addresses_.clear();
  owned_ = 0;
  file_ = Fd();
}

}  // namespace xllm::vmm
