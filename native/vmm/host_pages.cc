#include "host_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace xllm::vmm {
namespace {

constexpr std::size_t kPieceBytes = 16 * kHugePage;  // one collapse, one fallocate: bounded time between signals
constexpr int kRetries = 5;

std::size_t page_size() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

void* pointer(Address address) {
  return reinterpret_cast<void*>(address);
}  // NOLINT: addresses are this file's business

bool is_shortage(int code) { return code == ENOMEM || code == ENOSPC || code == EBUSY; }

[[noreturn]] void raise_create(int code, const char* what) {
  const std::string text = std::string(what) + ": " + std::strerror(code);
  if (is_shortage(code)) throw Shortage(Verb::kCreate, code, 0, text);
  throw Error(Verb::kCreate, code, 0, text);
}

int advise(Address address, std::size_t nbytes, int advice) {
  int code = 0;
  for (int attempt = 0; attempt < kRetries; ++attempt) {
    if (::madvise(pointer(address), nbytes, advice) == 0) return 0;
    code = errno;
    if (code != EAGAIN && code != EINTR) break;
  }
  return code;
}

// A place to touch pages of the file before they are mapped where they belong. Dropping it drops the page tables only.
class StagingWindow {
 public:
  StagingWindow() : address_(reserve_space(kPieceBytes, kHugePage)) {
    if (address_ == 0) raise_create(errno, "reserve the staging window");
  }
  StagingWindow(const StagingWindow&) = delete;
  StagingWindow& operator=(const StagingWindow&) = delete;
  ~StagingWindow() { ::munmap(pointer(address_), kPieceBytes); }

  Address show(int file, Extent piece) {
    void* const shown = ::mmap(pointer(address_), piece.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                               static_cast<off_t>(piece.offset));
    if (shown == MAP_FAILED) raise_create(errno, "map the staging window");
    return address_;
  }

 private:
  Address address_;
};

// One 2 MiB chunk that could not be collapsed together with its neighbours.
void back_chunk(int file, Extent chunk, Address shown, const std::function<bool(std::size_t)>& has_room) {
  const int code = advise(shown, chunk.nbytes, MADV_COLLAPSE);
  if (code == 0) return;
  if (code == EBUSY || !has_room) raise_create(code, "no huge page");
  if (!has_room(chunk.nbytes)) raise_create(ENOMEM, "no huge page and not enough free memory for small ones");
  back_small(file, chunk);  // the kernel is out of huge pages only: memory is fragmented
}

void back_piece(int file, Extent piece, StagingWindow& window, const std::function<bool(std::size_t)>& has_room) {
  const Address shown = window.show(file, piece);
  // Populated by the kernel, not by a store of ours: running out here is an errno, not a SIGBUS.
  for (std::size_t at = 0; at < piece.nbytes; at += kHugePage) {
    if (const int code = advise(shown + at, page_size(), MADV_POPULATE_WRITE))
      raise_create(code, "populate the first page");
  }
  const int code = advise(shown, piece.nbytes, MADV_COLLAPSE);
  if (code == 0) return;
  if (code == EBUSY) raise_create(code, "memory limit reached");
  for (std::size_t at = 0; at < piece.nbytes; at += kHugePage) {
    back_chunk(file, {piece.offset + at, kHugePage}, shown + at, has_room);
  }
}

template <typename Action>
void for_each_piece(Extent extent, Action action) {
  for (std::size_t at = 0; at < extent.nbytes; at += kPieceBytes) {
    action(Extent{extent.offset + at, std::min(kPieceBytes, extent.nbytes - at)});
  }
}

int cover_once(Address address, std::size_t nbytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  return ::mmap(pointer(address), nbytes, PROT_NONE, flags, -1, 0) == MAP_FAILED ? errno : 0;
}

int allocate(int file, int mode, Extent extent) {
  for (int attempt = 0;; ++attempt) {
    if (::fallocate(file, mode, static_cast<off_t>(extent.offset), static_cast<off_t>(extent.nbytes)) == 0) return 0;
    if (errno != EINTR || attempt == 100) return errno;
  }
}

}  // namespace

Fd make_sparse_file(std::uint64_t nbytes) {
  Fd file(::memfd_create("xllm-pages", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file || ::ftruncate(file.get(), static_cast<off_t>(nbytes)) != 0 ||
      ::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw Error(Verb::kCreate, errno, 0, std::string("make the memory file: ") + std::strerror(errno));
  }
  return file;
}

void back_huge(int file, Extent extent, const std::function<bool(std::size_t)>& has_room) {
  StagingWindow window;
  for_each_piece(extent, [&](Extent piece) { back_piece(file, piece, window, has_room); });
}

void back_small(int file, Extent extent) {
  for_each_piece(extent, [&](Extent piece) {
    if (const int code = allocate(file, 0, piece)) raise_create(code, "allocate pages");
  });
}

Probe probe_host() {
  if (::sysconf(_SC_PAGESIZE) != 4096) return {false, "the system's base page is not 4 KiB"};
  std::size_t pmd = kHugePage;
  std::ifstream("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") >> pmd;
  if (pmd != kHugePage) return {false, "the system's huge page is not 2 MiB"};
  try {
    const Fd file = make_sparse_file(kHugePage);
    back_huge(file.get(), {0, kHugePage}, nullptr);
  } catch (const Shortage&) {
    return {true, ""};
  } catch (const Error& error) {
    return {false, std::string(error.what())};
  }
  return {true, ""};
}

void fill(int file, Extent extent, std::uint8_t byte) {
  const std::vector<std::uint8_t> bytes(std::min(extent.nbytes, kHugePage), byte);
  for (std::size_t at = 0; at < extent.nbytes;) {
    const std::size_t part = std::min(bytes.size(), extent.nbytes - at);
    const ssize_t written = ::pwrite(file, bytes.data(), part, static_cast<off_t>(extent.offset + at));
    if (written < 0 && errno != EINTR) raise_create(errno, "fill pages");
    if (written > 0) at += static_cast<std::size_t>(written);
  }
}

int punch_hole(int file, Extent extent) { return allocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, extent); }

Address reserve_space(std::size_t nbytes, std::size_t alignment) {
  const std::size_t slack = nbytes + alignment;
  void* const space = ::mmap(nullptr, slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return 0;
  const auto start = reinterpret_cast<Address>(space);
  const Address aligned = (start + alignment - 1) / alignment * alignment;
  if (aligned > start) ::munmap(space, aligned - start);
  const Address end = start + slack;
  if (end > aligned + nbytes) ::munmap(pointer(aligned + nbytes), end - aligned - nbytes);
  return aligned;
}

int release_space(Address address, std::size_t nbytes) { return ::munmap(pointer(address), nbytes) == 0 ? 0 : errno; }

int put_extent(int file, Extent extent, Address address, bool huge) {
  // Small pages: MAP_POPULATE maps around each read fault, three times faster than MADV_POPULATE_WRITE, and the entries
  // are writable all the same. A 2 MiB entry is cheapest through MADV_POPULATE_WRITE, which also reports failure.
  const int flags = MAP_SHARED | MAP_FIXED | (huge ? 0 : MAP_POPULATE);
  if (::mmap(pointer(address), extent.nbytes, PROT_READ | PROT_WRITE, flags, file, static_cast<off_t>(extent.offset)) ==
      MAP_FAILED) {
    return errno;
  }
  return huge ? advise(address, extent.nbytes, MADV_POPULATE_WRITE) : 0;
}

SpareMapping::SpareMapping() { take(); }

SpareMapping::~SpareMapping() { give(); }

void SpareMapping::take() {
  void* const spare =
      ::mmap(nullptr, page_size(), PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);  // shared: never merged
  address_ = spare == MAP_FAILED ? 0 : reinterpret_cast<Address>(spare);
}

void SpareMapping::give() {
  if (address_ != 0) ::munmap(pointer(std::exchange(address_, 0)), page_size());
}

int SpareMapping::cover(Address address, std::size_t nbytes) {
  int code = cover_once(address, nbytes);
  if (code == 0) return 0;
  give();
  code = cover_once(address, nbytes);
  take();
  // The last resort needs no new mapping, but the entry of the old one stays.
  return code == 0 || ::mprotect(pointer(address), nbytes, PROT_NONE) == 0 ? 0 : code;
}

}  // namespace xllm::vmm
