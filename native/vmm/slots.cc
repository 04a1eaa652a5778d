#include "slots.h"

#include <algorithm>
#include <iterator>

namespace xllm::vmm {

void Slots::take_run(std::map<std::uint32_t, std::uint32_t>::iterator run, std::uint32_t count,
                     std::vector<std::uint32_t>& taken) {
  const auto [first, length] = *run;
  for (std::uint32_t i = 0; i < count; ++i) taken.push_back(first + i);
  free_.erase(run);
  if (length > count) free_.emplace(first + count, length - count);
}

std::vector<std::uint32_t> Slots::take(std::size_t count) {
  std::vector<std::uint32_t> taken;
  std::size_t available = 0;
  for (auto run = free_.begin(); run != free_.end(); ++run) {
    available += run->second;
    if (run->second < count) continue;
    take_run(run, static_cast<std::uint32_t>(count), taken);
    return taken;
  }
  if (available < count) return taken;
  while (taken.size() < count) {
    const auto run = free_.begin();
    take_run(run, static_cast<std::uint32_t>(std::min<std::size_t>(run->second, count - taken.size())), taken);
  }
  return taken;
}

void Slots::give(std::uint32_t slot) {
  auto next = free_.lower_bound(slot);
  std::uint32_t first = slot, length = 1;
  if (next != free_.end() && next->first == slot + 1) {
    length += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == slot) {
      previous->second += length;
      return;
    }
  }
  free_.emplace(first, length);
}

}  // namespace xllm::vmm
