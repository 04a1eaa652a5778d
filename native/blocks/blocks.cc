// BlockList and the three structures it is made of: Levels, Pages, Widths. Longer than other files, for a block that
// changes hands changes all of them.
#include "blocks.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>

namespace xllm::blocks {
namespace {

constexpr Block kNoBlock = std::numeric_limits<Block>::max();
constexpr std::size_t kBits = 64;

}  // namespace

// --- Levels ----------------------------------------------------------------------------------------------------------

void Levels::take_out(std::int64_t id) {
  Link& link = links_[index(id)];
  if (link.level == kNone) return;
  Ends& ends = ends_[index(link.level)];
  (link.previous == kNone ? ends.first : links_[index(link.previous)].next) = link.next;
  (link.next == kNone ? ends.last : links_[index(link.next)].previous) = link.previous;
  if (ends.first == kNone) filled_[index(link.level) / kBits] &= ~(std::uint64_t{1} << index(link.level) % kBits);
  link = Link{};
  --size_;
}

void Levels::put(std::int64_t id, std::int64_t level) {
  if (!known(id)) {
    if (level == kNone) return;
    links_.resize(std::max(index(id) + 1, links_.size() + links_.size() / 2));
  }
  take_out(id);
  if (level == kNone) return;
  if (index(level) >= ends_.size()) {
    ends_.resize(index(level) + 1);
    filled_.resize(index(level) / kBits + 1);
  }
  Ends& ends = ends_[index(level)];
  links_[index(id)] = {level, ends.last, kNone};
  (ends.last == kNone ? ends.first : links_[index(ends.last)].next) = id;
  ends.last = id;
  filled_[index(level) / kBits] |= std::uint64_t{1} << index(level) % kBits;
  ++size_;
}

std::int64_t Levels::front(std::int64_t level) const {
  return index(level) < ends_.size() ? ends_[index(level)].first : kNone;
}

std::int64_t Levels::highest() const {
  for (std::size_t word = filled_.size(); word-- > 0;) {
    if (filled_[word] != 0) return static_cast<std::int64_t>(word * kBits + kBits - 1) - std::countl_zero(filled_[word]);
  }
  return kNone;
}

std::vector<std::int64_t> Levels::ids(std::int64_t level) const {
  std::vector<std::int64_t> found;
  for (std::int64_t id = front(level); id != kNone; id = next(id)) found.push_back(id);
  return found;
}

// --- Pages -----------------------------------------------------------------------------------------------------------

Pages::Pages(std::int64_t width_in, std::int64_t page_bytes_in, std::int64_t tensors_in)
    : width(width_in), page_bytes(page_bytes_in), tensors(tensors_in) {
  if (width < 1 || page_bytes < 1 || tensors < 1) throw std::invalid_argument("sizes must be positive");
}

std::int32_t Pages::touching(Page page, Block start, Block stop) const {
  if (stop - start == 1) return 1;
  return static_cast<std::int32_t>(std::min(end_block(page), stop) - std::max(first_block(page), start));
}

void Pages::reach(Page page) {
  if (page < size()) return;
  const std::size_t wanted = std::max(at(page) + 1, live_.size() + live_.size() / 2);
  live_.resize(wanted);
  usable_.resize(wanted);
  since_.resize(wanted);
}

void Pages::set_usable(Page page, bool usable) {
  reach(page);
  usable_[at(page)] = usable;
}

void Pages::add_spare(Page page, double since) {
  if (is_spare(page)) return;
  reach(page);
  if (!is_present(page)) changed_.push_back(page);
  since_[at(page)] = since;
  spares_.put(page, 0);
}

void Pages::remove_spare(Page page) {
  if (!is_spare(page)) return;
  spares_.put(page, kNone);
  if (!is_present(page)) changed_.push_back(page);
}

// --- Widths ----------------------------------------------------------------------------------------------------------

void Widths::retain(Block start, Block stop) {
  for (std::size_t i = 0; i < pages_.size(); ++i) {
    Pages& pages = *pages_[i];
    const Page last = pages.last_page(stop - 1);
    pages.reach(last);
    for (Page page = pages.first_page(start); page <= last; ++page) {
      std::int32_t& live = pages.live_[Pages::at(page)];
      if (live == 0) {
        if (pages.is_spare(page)) {
          pages.spares_.put(page, kNone);
        } else {
          turned_.push_back({i, page});
          pages.changed_.push_back(page);
        }
      }
      live += pages.touching(page, start, stop);
    }
  }
}

void Widths::release(Block start, Block stop) {
  for (std::size_t i = 0; i < pages_.size(); ++i) {
    Pages& pages = *pages_[i];
    const Page last = pages.last_page(stop - 1);
    for (Page page = pages.first_page(start); page <= last; ++page) {
      std::int32_t& live = pages.live_[Pages::at(page)];
      live -= pages.touching(page, start, stop);
      if (live != 0) continue;
      if (pages.usable_[Pages::at(page)]) {
        pages.since_[Pages::at(page)] = now;
        pages.spares_.put(page, 0);
      } else {
        turned_.push_back({i, page});
        pages.changed_.push_back(page);
      }
    }
  }
}

bool Widths::are_present(Block block) const {
  for (const auto& pages : pages_) {
    for (Page page = pages->first_page(block); page <= pages->last_page(block); ++page) {
      if (!pages->is_present(page)) return false;
    }
  }
  return true;
}

std::int64_t Widths::emptied_by(const std::vector<Block>& blocks) const {
  std::int64_t emptied = 0;
  for (const auto& pages : pages_) {
    std::map<Page, std::int64_t> left;
    for (const Block block : blocks) {
      for (Page page = pages->first_page(block); page <= pages->last_page(block); ++page) {
        emptied += --left.try_emplace(page, pages->live(page)).first->second == 0 ? pages->tensors : 0;
      }
    }
  }
  return emptied;
}

std::int64_t Widths::cost(Block block, const std::vector<Page>& seen, const std::vector<std::vector<Page>>& gone) const {
  std::int64_t total = 0;
  for (std::size_t i = 0; i < pages_.size(); ++i) {
    const Pages& pages = *pages_[i];
    for (Page page = std::max(pages.first_page(block), seen[i] + 1); page <= pages.last_page(block); ++page) {
      const bool is_gone = !gone[i].empty() && std::binary_search(gone[i].begin(), gone[i].end(), page);
      if (is_gone || !pages.is_present(page)) total += pages.tensors;
    }
  }
  return total;
}

Block Widths::accept(Block block, std::vector<Page>& seen) const {
  Block stop = kNoBlock;
  for (std::size_t i = 0; i < pages_.size(); ++i) {
    const Pages& pages = *pages_[i];
    seen[i] = pages.last_page(block);
    stop = std::min(stop, (seen[i] + 1) * pages.page_bytes / pages.width);
  }
  return stop;
}

// --- BlockList: taking -----------------------------------------------------------------------------------------------

BlockList::BlockList(std::int64_t num_blocks_in, std::int64_t group_width, std::int64_t group_page,
                     std::shared_ptr<Widths> widths)
    : num_blocks(num_blocks_in), group_width_(group_width), group_page_(group_page), widths_(std::move(widths)) {
  if (group_width < 1 || group_page < 1) throw std::invalid_argument("sizes must be positive");
}

void BlockList::take_padding() {
  activate(1);
  states_[0] = kPadding;
  references_[0] = 1;
  widths_->retain(0, 1);
}

std::vector<Block> BlockList::take_ready(std::int64_t count, Block near) {
  if (count > num_ready_) throw std::logic_error("fewer ready blocks than are taken");
  std::vector<Block> taken;
  taken.reserve(at(count));
  if (is_active(near) && ready_[at(group(near))] > 0) count -= take_from(group(near), count, taken);
  while (count > 0 && is_active(near) && state(near + 1) == kReady) {
    near = group_start(group(near + 1) + 1) - 1;
    count -= take_from(group(near), count, taken);
  }
  while (count > 0) count -= take_from(by_use_.front(by_use_.highest()), count, taken);
  return taken;
}

std::int64_t BlockList::take_from(std::int64_t group, std::int64_t count, std::vector<Block>& taken) {
  const std::int64_t wanted = std::min<std::int64_t>(count, ready_[at(group)]);
  change(group, static_cast<std::int32_t>(wanted), 0, -static_cast<std::int32_t>(wanted));
  num_ready_ -= wanted;
  num_held_ += wanted;
  Block block = group_start(group);
  for (std::int64_t left = wanted; left > 0;) {
    while (states_[at(block)] != kReady) ++block;
    const Block start = block;
    while (left > 0 && block < activated() && states_[at(block)] == kReady) {
      taken.push_back(block++);
      --left;
    }
    hold(start, block);
  }
  return wanted;
}

void BlockList::hold(Block start, Block stop) {
  std::fill(states_.begin() + start, states_.begin() + stop, std::uint8_t{kHeld});
  std::fill(references_.begin() + start, references_.begin() + stop, 1);
  widths_->retain(start, stop);
}

void BlockList::take(Block start, Block stop) {
  activate(stop);
  for (Block block = start; block < stop; ++block) {
    if (!is_active(block)) throw std::logic_error("block " + std::to_string(block) + " does not exist");
    const std::uint8_t state = states_[at(block)];
    if (state != kCold && state != kReady) throw std::logic_error("block " + std::to_string(block) + " is not free");
    num_ready_ -= state == kReady;
    change(group(block), 1, 0, -(state == kReady));
  }
  num_held_ += stop - start;
  hold(start, stop);
}

Cold BlockList::cold(std::int64_t count, std::int64_t pages, const std::vector<std::pair<std::size_t, Page>>& gone) {
  std::vector<std::vector<Page>> given_up(widths_->size());
  for (const auto& [width, page] : gone) given_up[width].push_back(page);
  for (auto& list : given_up) std::sort(list.begin(), list.end());
  std::vector<Page> seen(widths_->size(), -1);
  Cold found;
  std::int64_t spent = 0;
  Block block = cold_from_ = next_cold(cold_from_);
  while (found.blocks < count && block < num_blocks) {
    spent += widths_->cost(block, seen, given_up);
    if (spent > pages) break;
    const Block free_until = std::min({widths_->accept(block, seen), block + count - found.blocks, num_blocks});
    const Block stop = end_of_cold(block + 1, free_until);
    if (!found.runs.empty() && found.runs.back().second == block) {
      found.runs.back().second = stop;
    } else {
      found.runs.emplace_back(block, stop);
    }
    found.blocks += stop - block;
    block = next_cold(stop);
  }
  return found;
}

std::vector<Block> BlockList::take_cold(std::int64_t count, std::int64_t pages) {
  const Cold found = cold(count, pages, {});
  std::vector<Block> taken;
  if (found.blocks < count) return taken;
  for (const auto& [start, stop] : found.runs) {
    take(start, stop);
    for (Block block = start; block < stop; ++block) taken.push_back(block);
  }
  return taken;
}

Block BlockList::next_cold(Block start) const {
  const auto from = states_.begin() + std::min(start, activated());
  const auto found = std::find(from, states_.end(), std::uint8_t{kCold});
  return found != states_.end() ? found - states_.begin() : std::max(start, activated());
}

Block BlockList::end_of_cold(Block start, Block end) const {
  while (start < end && start < activated() && states_[at(start)] == kCold) ++start;
  return start < activated() ? start : end;
}

// --- BlockList: references -------------------------------------------------------------------------------------------

void BlockList::retain(Block block) {
  if (references(block) > 0) {
    ++references_[at(block)];
    return;
  }
  if (state(block) != kCached) throw std::logic_error("block " + std::to_string(block) + " is neither held nor cached");
  states_[at(block)] = kHeld;
  references_[at(block)] = 1;
  --num_cached_;
  ++num_held_;
  change(group(block), 1, -1, 0);
}

bool BlockList::release(Block block) {
  if (references(block) < 1) throw std::logic_error("block " + std::to_string(block) + " released once too often");
  return --references_[at(block)] == 0;
}

void BlockList::cache(Block block) {
  states_[at(block)] = kCached;
  --num_held_;
  ++num_cached_;
  change(group(block), -1, 1, 0);
}

void BlockList::free(const std::vector<Block>& blocks, State before) {
  const std::int32_t held = before == kHeld ? -1 : 0, cached = before == kCached ? -1 : 0;
  for (std::size_t i = 0; i < blocks.size();) {
    const Block start = blocks[i];
    Block stop = start;
    while (i < blocks.size() && blocks[i] == stop) ++i, ++stop;
    if (start < 0 || stop > activated()) throw std::logic_error("block " + std::to_string(start) + " was never used");
    for (Block block = start; block < stop;) {
      if (states_[at(block)] != before) throw std::logic_error("block " + std::to_string(block) + " is free already");
      const std::int64_t group = this->group(block);
      const Block end = std::min(stop, group_start(group + 1));
      const auto count = static_cast<std::int32_t>(end - block);
      std::fill(states_.begin() + block, states_.begin() + end, std::uint8_t{kReady});
      change(group, held * count, cached * count, count);
      block = end;
    }
    widths_->release(start, stop);
    num_ready_ += stop - start;
    (before == kHeld ? num_held_ : num_cached_) -= stop - start;
  }
}

// --- BlockList: groups and pages -------------------------------------------------------------------------------------

void BlockList::change(std::int64_t group, std::int32_t held, std::int32_t cached, std::int32_t ready) {
  held_[at(group)] += held;
  const std::int32_t used = used_[at(group)] += held + cached;
  const std::int32_t left = ready_[at(group)] += ready;
  if (held != 0 || cached != 0) {
    const bool idle = held_[at(group)] == 0 && used > 0;
    if (idle != is_idle(group)) idle_.put(group, idle ? 0 : kNone);
  }
  const std::int64_t level = left > 0 ? used : kNone;
  if (level != by_use_.level(group)) by_use_.put(group, level);
}

void BlockList::activate(Block stop) {
  if (stop <= activated()) return;
  if (stop > num_blocks) throw std::logic_error("block " + std::to_string(stop - 1) + " does not exist");
  states_.resize(at(stop), kCold);
  references_.resize(at(stop));
  const std::size_t groups = at(group(stop - 1)) + 1;
  if (groups > used_.size()) {
    used_.resize(groups);
    held_.resize(groups);
    ready_.resize(groups);
  }
}

void BlockList::settle() {
  for (std::size_t width = 0; width < widths_->size(); ++width) {
    for (const Page page : widths_->take_changed(width)) {
      const Block stop = std::min(widths_->pages(width).end_block(page), num_blocks);
      if (width == 0) activate(stop);
      settle_run(widths_->pages(width).first_block(page), stop);
    }
  }
}

void BlockList::settle_run(Block start, Block stop) {
  for (Block block = start; block < std::min(stop, activated()); ++block) {
    std::uint8_t& state = states_[at(block)];
    if (state != kCold && state != kReady) continue;
    const bool ready = widths_->are_present(block);
    if (ready == (state == kReady)) continue;
    state = ready ? kReady : kCold;
    num_ready_ += ready ? 1 : -1;
    change(group(block), 0, 0, ready ? 1 : -1);
    if (!ready) cold_from_ = std::min(cold_from_, block);
  }
}

bool BlockList::is_any(Block start, Block stop, State state) const {
  const auto end = states_.begin() + std::min(stop, activated());
  const auto from = states_.begin() + std::min(start, activated());
  return std::find(from, end, static_cast<std::uint8_t>(state)) != end;
}

std::vector<Block> BlockList::blocks_in(Block start, Block stop, State state) const {
  std::vector<Block> found;
  for (Block block = start; block < std::min(stop, activated()); ++block) {
    if (states_[at(block)] == state) found.push_back(block);
  }
  return found;
}

std::pair<std::int64_t, std::int64_t> BlockList::pinned() const {
  std::int64_t groups = 0, slots = 0;
  for (std::int64_t group = 0; group < static_cast<std::int64_t>(held_.size()); ++group) {
    if (held_[at(group)] == 0) continue;
    ++groups;
    slots += std::min(group_start(group + 1), num_blocks) - group_start(group) - held_[at(group)];
  }
  return {groups, slots};
}

std::vector<Block> BlockList::targets(bool cold, std::int64_t limit) const {
  std::vector<Block> kept, open;  // of groups with held blocks, and of others; ascending
  for (Block block = 0; block < activated(); ++block) {
    if (!is_target(block, cold)) continue;
    auto& list = held_[at(group(block))] > 0 ? kept : open;
    if (std::ssize(list) < limit) list.push_back(block);
  }
  kept.insert(kept.end(), open.begin(), open.end());
  return kept;
}

std::int64_t BlockList::gain(const std::vector<std::pair<Block, Block>>& moves, std::int64_t pages) const {
  std::vector<Block> from, to;
  for (const auto& [source, target] : moves) {
    from.push_back(source);
    to.push_back(target);
  }
  std::sort(to.begin(), to.end());
  std::vector<Page> seen(widths_->size(), -1);
  std::int64_t opened = 0;
  for (const Block block : to) {
    opened += widths_->cost(block, seen, std::vector<std::vector<Page>>(widths_->size()));
    widths_->accept(block, seen);
  }
  return opened <= pages ? widths_->emptied_by(from) - opened : 0;
}

std::vector<std::pair<Block, Block>> BlockList::moves(std::int64_t limit, std::int64_t pages) const {
  const auto choose = [&](bool cold) {
    const std::vector<Block> to = targets(cold, limit);
    std::vector<std::pair<Block, Block>> found;
    for (Block block = activated() - 1; block >= 0 && std::ssize(found) < std::min<std::int64_t>(limit, std::ssize(to));
         --block) {
      if (states_[at(block)] != kCached || held_[at(group(block))] > 0) continue;
      const Block target = to[found.size()];
      if (held_[at(group(target))] == 0 && target >= block) break;
      found.emplace_back(block, target);
    }
    return found;
  };
  auto found = choose(false);
  if (!found.empty() || pages <= 0) return found;
  found = choose(true);
  while (!found.empty() && gain(found, pages) <= 0) found.resize(found.size() * 7 / 8);
  return found;
}

void BlockList::move(Block from, Block to) {
  if (state(from) != kCached || state(to) != kHeld) throw std::logic_error("a move of blocks that were not prepared");
  references_[at(to)] = 0;
  cache(to);
  free_cached({from});
}

std::vector<std::vector<std::int64_t>> BlockList::group_totals() const {
  std::vector<std::vector<std::int64_t>> totals;
  for (std::size_t group = 0; group < used_.size(); ++group) {
    totals.push_back({used_[group], held_[group], ready_[group], by_use_.level(static_cast<std::int64_t>(group))});
  }
  return totals;
}

}  // namespace xllm::blocks
