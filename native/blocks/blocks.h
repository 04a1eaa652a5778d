// Who holds a block, which pages the live blocks touch, and which free block comes next: the hot part of the cache's
// books. Pure C++: knows no Python, no driver, no tokens and no budget. What a page's coming or going means is decided
// by the caller, who is told only of pages that turned (Widths::turned).
//
//   block ids      0     1     2     3          Block b of a tensor of width w covers bytes [b*w, (b+1)*w).
//   w = 3, P = 4  |-----|-----|-----|-----|     Page p is live while any held or cached block touches it.
//   pages         [   0   |   1   |   2   ]
//
// INVARIANTS (the Python side's check() recounts all of them):
//   each activated block is exactly one of cold, ready, held, cached, padding; references > 0 for held and padding only
//   live[p] = held, cached and padding blocks that touch p;  a spare has live = 0 and is usable
//   ready = free, and every page it touches is live or a spare
//   used of a group = held + cached blocks that begin in it; it is on list `used` while it has ready blocks
//
// REQUIRES throughout: ids in [0, num_blocks); runs not empty. A block in the wrong state is a std::logic_error. Nothing
// here blocks, allocates device memory or calls back. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace xllm::blocks {

using Block = std::int64_t;
using Page = std::int64_t;
using Run = std::pair<Block, Block>;  // [first, second)

inline constexpr std::int64_t kNone = -1;

// First-in-first-out lists of small integers, one list per level; an id is on one list at most.
class Levels {
 public:
  void put(std::int64_t id, std::int64_t level);  // to the end of that list, from wherever it was; kNone: on none
  std::int64_t level(std::int64_t id) const { return known(id) ? links_[index(id)].level : kNone; }
  std::int64_t front(std::int64_t level) const;
  std::int64_t next(std::int64_t id) const { return links_[index(id)].next; }
  std::int64_t highest() const;  // the highest level with an id, or kNone
  std::size_t size() const { return size_; }
  std::vector<std::int64_t> ids(std::int64_t level) const;

 private:
  struct Link {
    std::int64_t level = kNone, previous = kNone, next = kNone;
  };
  struct Ends {
    std::int64_t first = kNone, last = kNone;
  };

  static std::size_t index(std::int64_t id) { return static_cast<std::size_t>(id); }
  bool known(std::int64_t id) const { return index(id) < links_.size(); }
  void take_out(std::int64_t id);

  std::vector<Link> links_;
  std::vector<Ends> ends_;
  std::vector<std::uint64_t> filled_;  // bit l: list l is not empty
  std::size_t size_ = 0;
};

// The pages of all tensors of one width: they are touched alike. A page is usable when every tensor has it mapped and
// none is stuck: it becomes a spare when its last live block goes.
class Pages {
 public:
  Pages(std::int64_t width, std::int64_t page_bytes, std::int64_t tensors);

  const std::int64_t width, page_bytes, tensors;

  Page first_page(Block block) const { return block * width / page_bytes; }
  Page last_page(Block block) const { return ((block + 1) * width - 1) / page_bytes; }
  Block first_block(Page page) const { return page * page_bytes / width; }
  Block end_block(Page page) const { return ((page + 1) * page_bytes + width - 1) / width; }

  std::int64_t live(Page page) const { return page < size() ? live_[at(page)] : 0; }
  bool is_spare(Page page) const { return spares_.level(page) == 0; }
  bool is_present(Page page) const { return live(page) > 0 || is_spare(page); }
  Page size() const { return static_cast<Page>(live_.size()); }

  void set_usable(Page page, bool usable);
  void add_spare(Page page, double since);  // the youngest; no-op if it is one
  void remove_spare(Page page);             // no-op if it is none
  Page oldest_spare() const { return spares_.front(0); }
  double since(Page page) const { return since_[at(page)]; }
  std::int64_t num_spares() const { return static_cast<std::int64_t>(spares_.size()); }
  std::vector<Page> spares() const { return spares_.ids(0); }
  const std::vector<std::int32_t>& counts() const { return live_; }

 private:
  friend class Widths;
  static std::size_t at(Page page) { return static_cast<std::size_t>(page); }
  std::int32_t touching(Page page, Block start, Block stop) const;
  void reach(Page page);

  std::vector<Page> changed_;  // pages that came or went since BlockList settled
  std::vector<std::int32_t> live_;
  std::vector<std::uint8_t> usable_;
  std::vector<double> since_;
  Levels spares_;
};

// A page whose last block went, or whose first came, other than from or to the spares.
struct Turned {
  std::size_t width;  // its index
  Page page;
};

// Pages a block list costs, counted in ascending order of blocks, each page once.
struct Cold {
  std::vector<Run> runs;
  std::int64_t blocks = 0;
};

class Widths {
 public:
  explicit Widths(std::vector<std::shared_ptr<Pages>> pages) : pages_(std::move(pages)) {}

  double now = 0.0;  // when pages that become spares now did so, in the caller's clock
  void retain(Block start, Block stop);
  void release(Block start, Block stop);
  std::vector<Turned> take_turned() { return std::exchange(turned_, {}); }
  bool has_turned() const { return !turned_.empty(); }
  std::vector<Page> take_changed(std::size_t width) { return std::exchange(pages_[width]->changed_, {}); }
  const Pages& pages(std::size_t width) const { return *pages_[width]; }

  bool are_present(Block block) const;
  std::int64_t emptied_by(const std::vector<Block>& blocks) const;  // pages that only these live blocks keep
  std::int64_t cost(Block block, const std::vector<Page>& seen, const std::vector<std::vector<Page>>& gone) const;
  Block accept(Block block, std::vector<Page>& seen) const;  // blocks up to the returned one cost nothing more
  std::size_t size() const { return pages_.size(); }

 private:
  std::vector<std::shared_ptr<Pages>> pages_;
  std::vector<Turned> turned_;
};

enum State : std::uint8_t { kCold, kReady, kHeld, kCached, kPadding };

class BlockList {
 public:
  // Blocks are grouped: block b begins in group b * group_width / group_page.
  BlockList(std::int64_t num_blocks, std::int64_t group_width, std::int64_t group_page, std::shared_ptr<Widths> widths);

  const std::int64_t num_blocks;

  std::int64_t num_ready() const { return num_ready_; }
  std::int64_t num_held() const { return num_held_; }
  std::int64_t num_cached() const { return num_cached_; }
  Block activated() const { return static_cast<Block>(states_.size()); }
  State state(Block block) const { return is_active(block) ? static_cast<State>(states_[at(block)]) : kCold; }
  std::int32_t references(Block block) const { return is_active(block) ? references_[at(block)] : 0; }
  const std::vector<std::uint8_t>& states() const { return states_; }

  void take_padding();
  // REQUIRES num_ready() >= count. From the page that `near` begins on while it has ready blocks, then from the pages
  // that follow it, then from the fullest. `near` kNone: no page is preferred.
  std::vector<Block> take_ready(std::int64_t count, Block near);
  Cold cold(std::int64_t count, std::int64_t pages, const std::vector<std::pair<std::size_t, Page>>& gone);
  // Exactly `count` cold blocks, lowest ids first, for at most `pages` more pages; none if there are not as many.
  std::vector<Block> take_cold(std::int64_t count, std::int64_t pages);
  void take(Block start, Block stop);  // these free blocks
  void retain(Block block);            // REQUIRES held or cached
  bool release(Block block);           // whether nobody holds it now; then free_held or cache comes next
  void free_held(const std::vector<Block>& blocks) { free(blocks, kHeld); }
  void free_cached(const std::vector<Block>& blocks) { free(blocks, kCached); }
  void cache(Block block);

  void activate(Block stop);
  // Sorts the free blocks of pages that came or went into ready and cold, activating those of new pages of width 0.
  void settle();

  std::int64_t group(Block block) const { return block * group_width_ / group_page_; }
  Block group_start(std::int64_t group) const { return (group * group_page_ + group_width_ - 1) / group_width_; }
  std::int64_t used(std::int64_t group) const { return used_[at(group)]; }
  std::vector<std::int64_t> idle_groups() const { return idle_.ids(0); }  // with cached and no held blocks, by age
  bool is_idle(std::int64_t group) const { return idle_.level(group) == 0; }
  bool is_any(Block start, Block stop, State state) const;
  std::vector<Block> blocks_in(Block start, Block stop, State state) const;
  // (groups with held blocks, blocks of these groups that are not held): pages that stay whatever is forgotten.
  std::pair<std::int64_t, std::int64_t> pinned() const;
  // At most `limit` moves (from a cached block, to a free one): the highest cached blocks of groups without held ones go
  // to free blocks of groups with, then to the lowest. Targets are ready; with `pages` > 0 also cold ones that open at
  // most so many pages, if more are emptied than opened. Changes nothing.
  std::vector<std::pair<Block, Block>> moves(std::int64_t limit, std::int64_t pages) const;
  void move(Block from, Block to);  // REQUIRES from cached, to held: now it is the other that is cached, `from` is free
  std::vector<std::vector<std::int64_t>> group_totals() const;  // used, held, ready, list it is on
  Block cold_from() const { return cold_from_; }

 private:
  static std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }
  bool is_active(Block block) const { return block >= 0 && block < activated(); }
  void change(std::int64_t group, std::int32_t held, std::int32_t cached, std::int32_t ready);
  void hold(Block start, Block stop);
  void free(const std::vector<Block>& blocks, State before);
  void settle_run(Block start, Block stop);
  std::int64_t take_from(std::int64_t group, std::int64_t count, std::vector<Block>& taken);
  bool is_target(Block block, bool cold) const { return state(block) == kReady || (cold && state(block) == kCold); }
  std::vector<Block> targets(bool cold, std::int64_t limit) const;
  std::int64_t gain(const std::vector<std::pair<Block, Block>>& moves, std::int64_t pages) const;
  Block next_cold(Block start) const;
  Block end_of_cold(Block start, Block end) const;

  const std::int64_t group_width_, group_page_;
  std::shared_ptr<Widths> widths_;
  std::vector<std::uint8_t> states_;
  std::vector<std::int32_t> references_;
  std::vector<std::int32_t> used_, held_, ready_;  // per group
  Levels by_use_, idle_;
  std::int64_t num_ready_ = 0, num_held_ = 0, num_cached_ = 0;
  Block cold_from_ = 0;
};

}  // namespace xllm::blocks
