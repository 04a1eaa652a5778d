// The system calls under the host driver: extents of a sparse memfd get memory and lose it, address space is reserved
// and covered again. Knows no handles, ranges or budgets. Calls that can fail in passing return an errno, 0 on success.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "driver.h"
#include "host_memory.h"

namespace xllm::vmm {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

struct Extent {
  std::uint64_t offset;
  std::size_t nbytes;
};

// Calls action(extent, first, last) for every run of adjacent slots; [first, last) are their places in `slots`, which
// rise.
template <typename Action>
void for_each_extent(const std::vector<std::uint32_t>& slots, std::size_t page_bytes, Action action) {
  for (std::size_t first = 0, last; first < slots.size(); first = last) {
    for (last = first + 1; last < slots.size() && slots[last] == slots[last - 1] + 1;) ++last;
    action(Extent{std::uint64_t{slots[first]} * page_bytes, (last - first) * page_bytes}, first, last);
  }
}

// A sparse memfd of `nbytes` that nobody can resize or seal further: no peer can make our access a SIGBUS.
Fd make_sparse_file(std::uint64_t nbytes);

// Gives the extent (multiple of 2 MiB) huge kernel pages. Where the kernel has none though memory is free, `has_room`
// (may be empty: no) decides whether small pages may stand in for 2 MiB. Throws Shortage or Error(create); the extent
// is then to be punched.
void back_huge(int file, Extent extent, const std::function<bool(std::size_t)>& has_room);

// Gives the extent small kernel pages. Throws Shortage or Error(create). Out of memory may be a SIGKILL instead.
void back_small(int file, Extent extent);

// Overwrites the extent with one byte.
void fill(int file, Extent extent, std::uint8_t byte);

// Gives the extent's memory back to the system; it reads as a hole afterwards.
int punch_hole(int file, Extent extent);

struct Probe {
  bool huge;           // mode huge works here
  std::string reason;  // why not
};

// Tries mode huge with one page. Running out of memory while trying counts as working.
Probe probe_host();

// Address space without memory at a multiple of `alignment`; 0 and errno when there is none.
Address reserve_space(std::size_t nbytes, std::size_t alignment);
int release_space(Address address, std::size_t nbytes);

// Puts the extent at `address` and fills the page tables. On failure the address is to be covered.
int put_extent(int file, Extent extent, Address address, bool huge);

// Takes pages out of a range. At the kernel's limit of mappings even replacing one fails, though the result would need
// fewer: an idle mapping of one page is kept to be given up in that moment.
class SpareMapping {
 public:
  SpareMapping();
  SpareMapping(const SpareMapping&) = delete;
  SpareMapping& operator=(const SpareMapping&) = delete;
  ~SpareMapping();

  // Makes the range inaccessible; its pages lose this mapping. On failure nothing has changed.
  int cover(Address address, std::size_t nbytes);

 private:
  void take();
  void give();

  Address address_ = 0;
};

}  // namespace xllm::vmm
