#include "virtual_space.h"

namespace ascendcl {
namespace {

std::uint64_t round_up(std::uint64_t nbytes, std::uint64_t unit) { return (nbytes + unit - 1) / unit * unit; }

}  // namespace

std::uint64_t VirtualSpace::rounded(std::uint64_t nbytes) { return round_up(nbytes, nbytes > kSmall ? kGiB : kPage); }

std::uint64_t VirtualSpace::find_units(std::uint64_t count, std::uint64_t from) const {
  std::uint64_t run = 0;
  for (std::uint64_t unit = from; unit < kUnits; ++unit) {
    run = used_[unit] ? 0 : run + 1;
    if (run == count) return unit + 1 - count;
  }
  return kUnits;
}

std::uint64_t VirtualSpace::take(std::uint64_t nbytes) {
  if (nbytes <= kSmall) return take_small(round_up(nbytes, kPage) / kPage);
  const std::uint64_t count = round_up(nbytes, kGiB) / kGiB;
  std::uint64_t unit = find_units(count, next_);
  if (unit == kUnits) unit = find_units(count, 0);
  if (unit == kUnits) return 0;
  for (std::uint64_t index = unit; index < unit + count; ++index) used_[index] = true;
  next_ = unit + count;
  return kBase + unit * kGiB;
}

std::uint64_t VirtualSpace::take_small(std::uint64_t pages) {
  for (auto& [unit, taken] : shared_) {
    std::uint64_t run = 0;
    for (std::uint64_t page = 0; page < taken.size(); ++page) {
      run = taken[page] ? 0 : run + 1;
      if (run < pages) continue;
      for (std::uint64_t index = page + 1 - pages; index <= page; ++index) taken[index] = true;
      return kBase + unit * kGiB + (page + 1 - pages) * kPage;
    }
  }
  std::uint64_t unit = find_units(1, next_);
  if (unit == kUnits) unit = find_units(1, 0);
  if (unit == kUnits) return 0;
  used_[unit] = true;
  next_ = unit + 1;
  shared_[unit];
  return take_small(pages);
}

void VirtualSpace::give(std::uint64_t address, std::uint64_t nbytes) {
  const std::uint64_t unit = (address - kBase) / kGiB;
  if (nbytes > kSmall) {
    const std::uint64_t count = round_up(nbytes, kGiB) / kGiB;
    for (std::uint64_t index = unit; index < unit + count; ++index) used_[index] = false;
    return;
  }
  Pages& taken = shared_[unit];
  const std::uint64_t first = (address - kBase) % kGiB / kPage;
  for (std::uint64_t index = first; index < first + round_up(nbytes, kPage) / kPage; ++index) taken[index] = false;
  if (taken.any()) return;
  shared_.erase(unit);
  used_[unit] = false;
}

}  // namespace ascendcl
