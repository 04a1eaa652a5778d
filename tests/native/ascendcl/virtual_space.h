// The addresses of the device window, given out as the driver of the 910B does. Knows addresses, maps nothing.
//
//   16 TiB                                                            24 TiB of the host process
//     |  1 GiB unit | 1 GiB unit | ...  5376 units = 5.25 TiB, all devices together  ... |
//   above 512 MiB: whole units, rounded up; below: carved from shared units, 2 MiB granular.
#pragma once

#include <bitset>
#include <cstdint>
#include <map>
#include <vector>

#include "abi.h"

namespace ascendcl {

class VirtualSpace {
 public:
  static constexpr std::uint64_t kBase = 17 * 1024 * kGiB;  // sanitizers' shadow ends just above 16 TiB
  static constexpr std::uint64_t kUnits = 5376;
  static constexpr std::uint64_t kEnd = kBase + kUnits * kGiB;
  static constexpr std::uint64_t kSmall = 512 * kMiB;

  // A free range of at least `nbytes`, or 0. Whole units given back are taken again as late as possible.
  std::uint64_t take(std::uint64_t nbytes);
  void give(std::uint64_t address, std::uint64_t nbytes);

  static std::uint64_t rounded(std::uint64_t nbytes);
  static bool contains(std::uint64_t address) { return address >= kBase && address < kEnd; }

 private:
  using Pages = std::bitset<kGiB / kPage>;
  std::uint64_t find_units(std::uint64_t count, std::uint64_t from) const;
  std::uint64_t take_small(std::uint64_t pages);

  std::vector<bool> used_ = std::vector<bool>(kUnits);
  std::map<std::uint64_t, Pages> shared_;  // unit → its pages in use
  std::uint64_t next_ = 0;                 // the unit to look at first
};

}  // namespace ascendcl
