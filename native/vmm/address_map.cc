#include "address_map.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <utility>

namespace xllm::vmm {
namespace {

// Mappings between two counts of all: counting reads a line for each.
constexpr std::int64_t kRecount = 4096;

std::atomic<std::int64_t> process_total{0};
// Mappings that no driver made (libraries, stacks, files of weights), and process_total when they were last counted.
std::atomic<std::int64_t> others{0}, counted_at{-kRecount};

void count_others(std::int64_t ours) {
  if (ours < counted_at + kRecount) return;
  counted_at = ours;
  std::ifstream maps("/proc/self/maps");
  const auto lines = std::count(std::istreambuf_iterator<char>(maps), {}, '\n');
  others = std::max<std::int64_t>(0, lines - process_total);
}

std::int64_t default_vma_limit() {
  std::int64_t limit = 65530;
  std::ifstream("/proc/sys/vm/max_map_count") >> limit;
  return limit * 7 / 10;
}

}  // namespace

AddressMap::AddressMap(std::size_t page_bytes, std::int64_t vma_limit)
    : page_bytes_(page_bytes), vma_limit_(vma_limit != 0 ? vma_limit : default_vma_limit()) {}

void AddressMap::check_range(Verb verb, Address address, std::size_t nbytes) const {
  const auto range = ranges_.find(address);
  if (range == ranges_.end() || range->second != nbytes) throw Error(verb, EINVAL, address, "not a reserved range");
  const auto page = pages_.lower_bound(address);
  if (page != pages_.end() && page->first < address + nbytes) {
    throw Error(verb, EBUSY, page->first, "a page is mapped in the range");
  }
}

void AddressMap::check_handle(Verb verb, Handle handle) const {
  if (!handles_.contains(handle)) throw Error(verb, EINVAL, 0, "handle " + std::to_string(handle) + " does not exist");
}

void AddressMap::check_idle(const std::vector<Handle>& sorted) const {
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    check_handle(Verb::kDestroy, sorted[i]);
    if (handles_.at(sorted[i]) != 0) {
      throw Error(Verb::kDestroy, EBUSY, 0, "handle " + std::to_string(sorted[i]) + " is mapped");
    }
    if (i > 0 && sorted[i] == sorted[i - 1]) throw Error(Verb::kDestroy, EINVAL, 0, "a handle appears twice");
  }
}

void AddressMap::check_mapped(const std::vector<Address>& sorted) const {
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (!pages_.contains(sorted[i])) throw Error(Verb::kUnmap, EINVAL, sorted[i], "no page is mapped here");
    if (i > 0 && sorted[i] == sorted[i - 1]) throw Error(Verb::kUnmap, EINVAL, sorted[i], "an address appears twice");
  }
}

void AddressMap::insert(const Page& page) {
  check_handle(Verb::kMap, page.handle);
  auto range = ranges_.upper_bound(page.address);
  const bool inside = range != ranges_.begin() && page.address - (--range)->first < range->second;
  if (!inside || (page.address - range->first) % page_bytes_ != 0) {
    throw Error(Verb::kMap, EINVAL, page.address, "not a page of a reserved range");
  }
  if (!pages_.emplace(page.address, page.handle).second) throw Error(Verb::kMap, EBUSY, page.address, "already mapped");
  ++handles_.at(page.handle);
  runs_ += 1 - joined(page.address - page_bytes_, page.address) - joined(page.address, page.address + page_bytes_);
}

void AddressMap::erase(Address address) {
  runs_ -= 1 - joined(address - page_bytes_, address) - joined(address, address + page_bytes_);
  --handles_.at(pages_.extract(address).mapped());
}

bool AddressMap::joined(Address low, Address high) const {
  const auto first = pages_.find(low), second = pages_.find(high);
  return first != pages_.end() && second != pages_.end() && slot_of(first->second) + 1 == slot_of(second->second);
}

void AddressMap::charge(Verb verb) {
  const std::int64_t change = wanted() - charged_;
  if (change > 0) count_others(process_total + change);
  const std::int64_t used = process_total.fetch_add(change) + change + others;
  if (change > 0 && used > vma_limit_) {
    process_total.fetch_sub(change);
    throw Shortage(verb, ENOMEM, 0,
                   "address-space entries: " + std::to_string(used) + " needed, " + std::to_string(vma_limit_) +
                       " allowed (70 % of vm.max_map_count unless set)");
  }
  charged_ += change;
}

void AddressMap::settle() {
  const std::int64_t change = wanted() - charged_;
  process_total.fetch_add(change);
  charged_ += change;
}

std::int64_t AddressMap::process_vmas() {
  count_others(process_total);
  return process_total + others;
}

void AddressMap::clear() {
  pages_.clear();
  handles_.clear();
  ranges_.clear();
  runs_ = 0;
  settle();
}

}  // namespace xllm::vmm
