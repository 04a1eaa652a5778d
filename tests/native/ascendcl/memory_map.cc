#include "memory_map.h"

#include <algorithm>

#include "call.h"
#include "ledger.h"
#include "pages.h"

namespace ascendcl {
namespace {

constexpr std::uint64_t kLongestReservation = 128 * kGiB;

const char* side_name(int device) { return device < 0 ? "the host" : "a device"; }

std::uint64_t whole_pages(std::uint64_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

unsigned long long number(std::uint64_t value) { return value; }

}  // namespace

MemoryMap& memory_map() {
  static MemoryMap& kept = *new MemoryMap;  // never destroyed: calls may come during exit
  return kept;
}

std::uint64_t MemoryMap::reserve(std::uint64_t nbytes) {
  // Driver rule 1: one reservation is at most 128 GiB.
  if (nbytes > kLongestReservation) {
    violate(kOutOfMemory, "a reservation is at most 128 GiB", text("%llu bytes asked for", number(nbytes)));
  }
  const std::uint64_t address = space_.take(nbytes);
  // Driver rule 2: 5.25 TiB for all devices together.
  if (address == 0) fail(kOutOfMemory, text("no address range of %llu bytes is left", number(nbytes)));
  reservations_[address] = {whole_pages(nbytes), VirtualSpace::rounded(nbytes), std::nullopt, std::nullopt};
  hold_range(address, VirtualSpace::rounded(nbytes));
  return address;
}

void MemoryMap::release(std::uint64_t address) {
  const auto found = reservations_.find(address);
  if (found == reservations_.end()) {
    violate(kInvalidValue, "release takes the exact start of a reservation", text("%#llx is none", number(address)));
  }
  const std::uint64_t end = address + found->second.nbytes;
  const auto first = extents_.lower_bound(address);
  const auto last = extents_.lower_bound(end);
  const bool has_maps = first != last;
  // Driver rule 8: the mappings go, but the handles keep their map count, so their memory is lost until exit.
  for (auto extent = first; extent != last; ++extent) extent->second.physical->lost = true;
  extents_.erase(first, last);
  leave_range(address, found->second.space);
  space_.give(address, found->second.space);
  reservations_.erase(found);
  if (has_maps) note_violation("aclrtReleaseMemAddress", "unmap everything before release", "the range had live maps");
}

void* MemoryMap::create(std::uint64_t nbytes, std::uint64_t page_bytes, int device) {
  if (device >= 0 && !take_memory(device, nbytes)) {
    const DeviceMemory memory = device_memory(device);
    fail(kOutOfMemory, text("device %d has %llu of %llu bytes free, %llu are asked for", device, number(memory.free),
                            number(memory.total), number(nbytes)));
  }
  auto physical = std::make_shared<Physical>();
  physical->nbytes = nbytes;
  physical->page_bytes = page_bytes;
  physical->device = device;
  physical->file = pages_file();
  physical->offset = take_pages(nbytes);
  return handles_.add(std::move(physical));
}

void* MemoryMap::adopt(std::shared_ptr<Physical> physical) { return handles_.add(std::move(physical)); }

std::shared_ptr<Physical> MemoryMap::owned(const void* handle) const {
  const std::shared_ptr<Physical> physical = handles_.find(handle);
  if (physical == nullptr) {
    const char* what = handles_.was_given(handle) ? "was freed" : "is none";
    violate(kBadHandle, "a handle is not used after FreePhysical", text("handle %p %s", handle, what));
  }
  if (physical->owners == 0) {
    violate(kInvalidValue, "a handle is not used after FreePhysical", text("handle %p is only mapped", handle));
  }
  return physical;
}

void MemoryMap::destroy(void* handle) {
  const std::shared_ptr<Physical> physical = owned(handle);
  --physical->owners;
  if (!physical->is_alive()) drop(*physical, handle);
}

// The memory goes back with the last owner or the last mapping, whichever goes later.
void MemoryMap::drop(Physical& physical, const void* handle) {
  if (physical.imported) {
    close_pages(physical.file);
  } else {
    if (physical.device >= 0) give_memory(physical.device, physical.nbytes);
    drop_pages(physical.offset, physical.nbytes);
  }
  handles_.remove(handle);
}

void* MemoryMap::retain(std::uint64_t address) {
  Extent& extent = exact(address, "retain takes the exact start of a map");
  ++extent.physical->owners;
  return extent.handle;
}

void MemoryMap::check_free(std::uint64_t address, std::uint64_t nbytes) const {
  const auto next = extents_.lower_bound(address);
  const bool hits_next = next != extents_.end() && next->first < address + nbytes;
  // Driver rule 5.
  if (hits_next || find(address) != nullptr) {
    violate(kDriverError, "map only where nothing is mapped", text("%#llx has a map already", number(address)));
  }
}

void MemoryMap::map(std::uint64_t address, std::uint64_t nbytes, void* handle, bool accessible) {
  const std::shared_ptr<Physical> physical = owned(handle);
  if (nbytes != physical->nbytes) {
    violate(kInvalidValue, "map the whole handle",
            text("size %llu, the handle has %llu", number(nbytes), number(physical->nbytes)));
  }
  if (address % physical->page_bytes != 0) {
    violate(kDriverError, "addresses are aligned to the page", text("%#llx is not", number(address)));
  }
  auto found = reservations_.upper_bound(address);
  if (found == reservations_.begin() || std::prev(found)->first + std::prev(found)->second.nbytes <= address) {
    violate(kInvalidValue, "map inside a reservation", text("%#llx lies in none", number(address)));
  }
  --found;
  Reservation& reservation = found->second;
  if (address + nbytes > found->first + reservation.nbytes) {
    violate(kDriverError, "map inside a reservation", text("%#llx + %llu leaves it", number(address), number(nbytes)));
  }
  check_free(address, nbytes);
  // Driver rule 4: the first successful map pins the reservation, unmap does not loosen it.
  if (reservation.side.value_or(physical->device) != physical->device) {
    violate(kDriverError, "a reservation belongs to the device of its first map",
            text("it belongs to %s (%d), the handle to %s (%d)", side_name(*reservation.side), *reservation.side,
                 side_name(physical->device), physical->device));
  }
  if (reservation.imported.value_or(physical->imported) != physical->imported) {
    violate(kDriverError, "local and imported handles are not mixed in a reservation", text("%p is mixed in", handle));
  }
  map_pages(address, nbytes, physical->file, physical->offset, accessible);
  reservation.side = physical->device;
  reservation.imported = physical->imported;
  ++physical->maps;
  extents_[address] = {nbytes, physical->device, physical, handle, found->first, accessible};
}

Extent& MemoryMap::exact(std::uint64_t address, const char* rule) {
  const auto found = extents_.find(address);
  // Driver rule 7.
  if (found == extents_.end() || found->second.physical == nullptr) {
    violate(kDriverError, rule, text("%#llx is not the start of a map", number(address)));
  }
  return found->second;
}

void MemoryMap::unmap(std::uint64_t address) {
  const Extent extent = exact(address, "unmap takes the exact start of a map");
  // Driver rule 9: a running copy holds its pages.
  if (extent.readers > 0) {
    violate(kDriverError, "no unmap while a copy runs on the page", text("%#llx is being copied", number(address)));
  }
  hold_range(address, extent.nbytes);
  extents_.erase(address);
  if (--extent.physical->maps == 0 && !extent.physical->is_alive()) drop(*extent.physical, extent.handle);
}

void MemoryMap::set_access(std::uint64_t address, std::uint64_t nbytes) {
  Extent& extent = exact(address, "set access takes exactly one map");
  if (extent.nbytes != nbytes) {
    violate(kDriverError, "set access takes exactly one map",
            text("size %llu, the map has %llu", number(nbytes), number(extent.nbytes)));
  }
  if (!extent.accessible) open_range(address, nbytes);
  extent.accessible = true;
}

std::uint64_t MemoryMap::allocate(std::uint64_t nbytes, int device) {
  if (!take_memory(device, whole_pages(nbytes))) {
    fail(kOutOfMemory, text("device %d has %llu bytes free, %llu are asked for", device,
                            number(device_memory(device).free), number(nbytes)));
  }
  const std::uint64_t address = space_.take(nbytes);
  if (address == 0) {
    give_memory(device, whole_pages(nbytes));
    fail(kOutOfMemory, text("no address range of %llu bytes is left", number(nbytes)));
  }
  map_block(address, whole_pages(nbytes));
  extents_[address] = {whole_pages(nbytes), device, nullptr, nullptr, 0, true};
  return address;
}

void MemoryMap::free_block(std::uint64_t address) {
  const auto found = extents_.find(address);
  if (found == extents_.end() || found->second.physical != nullptr) {
    violate(kInvalidValue, "free takes what malloc returned", text("%#llx is no block", number(address)));
  }
  const Extent block = found->second;
  if (block.readers > 0) {
    violate(kDriverError, "no free while a copy runs on the block", text("%#llx is being copied", number(address)));
  }
  leave_range(address, block.nbytes);
  space_.give(address, block.nbytes);
  give_memory(block.device, block.nbytes);
  extents_.erase(found);
}

const std::pair<const std::uint64_t, Extent>* MemoryMap::find(std::uint64_t address) const {
  auto found = extents_.upper_bound(address);
  if (found == extents_.begin()) return nullptr;
  --found;
  return found->first + found->second.nbytes > address ? &*found : nullptr;
}

std::string MemoryMap::missing(const Span& span) const {
  const std::uint64_t end = span.address + span.nbytes;
  if (end <= VirtualSpace::kBase || span.address >= VirtualSpace::kEnd) return "";
  for (std::uint64_t address = span.address; address < end;) {
    const auto* extent = find(address);
    if (extent == nullptr) return text("%#llx is not mapped", number(address));
    if (!extent->second.accessible) return text("%#llx has no access", number(address));
    address = extent->first + extent->second.nbytes;
  }
  return "";
}

void MemoryMap::change_readers(const std::vector<Span>& spans, int change) {
  for (const Span& span : spans) {
    for (std::uint64_t address = span.address; address < span.address + span.nbytes;) {
      const auto* found = find(address);
      if (found == nullptr) break;
      extents_.at(found->first).readers += change;
      address = found->first + found->second.nbytes;
    }
  }
}

}  // namespace ascendcl
