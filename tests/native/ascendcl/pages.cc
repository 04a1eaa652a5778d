#include "pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "settings.h"

namespace ascendcl {
namespace {

constexpr std::uint64_t kFirstOffset = 64 << 10;  // below: the table of exports
constexpr std::uint64_t kFileBytes = std::uint64_t{1} << 46;

void check(bool worked, const char* what) {
  if (worked) return;
  std::fprintf(stderr, "ascendcl emulator: the host refused %s: %s\n", what, std::strerror(errno));
  std::abort();
}

void* at(std::uint64_t address) { return reinterpret_cast<void*>(address); }

void place(std::uint64_t address, std::uint64_t nbytes, int protection, int flags, int file, std::uint64_t offset) {
  void* placed = ::mmap(at(address), nbytes, protection, flags | MAP_NORESERVE, file, static_cast<off_t>(offset));
  check(placed == at(address), "a mapping in the device window");
}

void poison(void* memory, std::uint64_t nbytes) {
  if (settings().poison >= 0) std::memset(memory, settings().poison, nbytes);
}

}  // namespace

int pages_file() {
  static const int file = [] {
    const int made = ::memfd_create("ascendcl", MFD_CLOEXEC);
    check(made >= 0 && ::ftruncate(made, static_cast<off_t>(kFileBytes)) == 0, "a memory file");
    return made;
  }();
  return file;
}

std::uint64_t take_pages(std::uint64_t nbytes) {
  static std::atomic<std::uint64_t> next{kFirstOffset};
  const std::uint64_t offset = next.fetch_add(nbytes);  // never reused: the file is sparse
  if (settings().poison >= 0) {
    void* mapped = ::mmap(nullptr, nbytes, PROT_WRITE, MAP_SHARED, pages_file(), static_cast<off_t>(offset));
    check(mapped != MAP_FAILED, "a mapping to poison");
    poison(mapped, nbytes);
    ::munmap(mapped, nbytes);
  }
  return offset;
}

void close_pages(int file) { ::close(file); }

void drop_pages(std::uint64_t offset, std::uint64_t nbytes) {
  const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  check(::fallocate(pages_file(), mode, static_cast<off_t>(offset), static_cast<off_t>(nbytes)) == 0, "freeing pages");
}

void hold_range(std::uint64_t address, std::uint64_t nbytes) {
  place(address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

void map_pages(std::uint64_t address, std::uint64_t nbytes, int file, std::uint64_t offset, bool accessible) {
  const int protection = accessible ? PROT_READ | PROT_WRITE : PROT_NONE;
  place(address, nbytes, protection, MAP_SHARED | MAP_FIXED, file, offset);
}

void map_block(std::uint64_t address, std::uint64_t nbytes) {
  place(address, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  poison(at(address), nbytes);
}

void open_range(std::uint64_t address, std::uint64_t nbytes) {
  check(::mprotect(at(address), nbytes, PROT_READ | PROT_WRITE) == 0, "access to a range");
}

void leave_range(std::uint64_t address, std::uint64_t nbytes) {
  check(::munmap(at(address), nbytes) == 0, "leaving a range");
}

}  // namespace ascendcl
