#include "sharing.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string>

#include "call.h"
#include "memory_map.h"
#include "pages.h"

namespace ascendcl {
namespace {

constexpr int kMostExports = 600;  // as many as fit in the table
constexpr std::size_t kMostImporters = 16;

struct Entry {
  std::uint64_t offset, nbytes;
  std::uint64_t restricted;
  std::array<std::int32_t, kMostImporters> importers;
};
static_assert(sizeof(Entry) * kMostExports <= 64 << 10);

// process id << 32 | descriptor << 16 | entry + 1
struct Shareable {
  std::int32_t process;
  int file, entry;
};

Shareable read_key(std::uint64_t key) {
  const int file = static_cast<int>(key >> 16 & 0xFFFF);
  return {static_cast<std::int32_t>(key >> 32), file, static_cast<int>(key & 0xFFFF) - 1};
}

bool read_entry(int file, int index, Entry& entry) {
  const auto place = static_cast<off_t>(sizeof(Entry) * static_cast<std::size_t>(index));
  return ::pread(file, &entry, sizeof entry, place) == static_cast<ssize_t>(sizeof entry) && entry.nbytes != 0;
}

void write_entry(int index, const Entry& entry) {
  const auto place = static_cast<off_t>(sizeof(Entry) * static_cast<std::size_t>(index));
  if (::pwrite(pages_file(), &entry, sizeof entry, place) != static_cast<ssize_t>(sizeof entry)) {
    fail(kDriverError, "the table of exports cannot be written");
  }
}

}  // namespace

std::uint64_t export_handle(void* handle, bool restricted) {
  static int num_exports = 0;
  const auto lock = memory_map().lock();
  const auto physical = memory_map().owned(handle);
  if (physical->exported || physical->imported) {
    violate(kDriverError, "one export per handle", text("handle %p was exported or imported before", handle));
  }
  if (num_exports == kMostExports) fail(kDriverError, "the emulator's table of exports is full");
  write_entry(num_exports, {physical->offset, physical->nbytes, restricted, {}});
  physical->exported = true;
  const auto process = static_cast<std::uint64_t>(::getpid());
  return process << 32 | static_cast<std::uint64_t>(pages_file()) << 16 | static_cast<std::uint64_t>(++num_exports);
}

void allow_import(std::uint64_t key, const std::int32_t* processes, std::size_t count) {
  const Shareable shareable = read_key(key);
  Entry entry{};
  if (shareable.process != ::getpid() || !read_entry(pages_file(), shareable.entry, entry)) {
    violate(kInvalidValue, "the exporter names the importers", "not a number this process exported");
  }
  for (std::size_t index = 0; index < count; ++index) {
    auto free = std::find(entry.importers.begin(), entry.importers.end(), 0);
    if (free == entry.importers.end()) fail(kDriverError, "the emulator's list of importers is full");
    *free = processes[index];
  }
  write_entry(shareable.entry, entry);
}

void* import_handle(std::uint64_t key, int device) {
  const Shareable shareable = read_key(key);
  if (shareable.process == ::getpid()) {
    violate(kDriverError, "import in another process", "this process exported the handle");
  }
  const std::string path = text("/proc/%d/fd/%d", shareable.process, shareable.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  Entry entry{};
  if (file < 0 || !read_entry(file, shareable.entry, entry)) {
    if (file >= 0) ::close(file);
    violate(kInvalidValue, "import what was exported", text("%#jx is no export", static_cast<std::uintmax_t>(key)));
  }
  const auto& importers = entry.importers;
  if (entry.restricted != 0 && std::find(importers.begin(), importers.end(), ::getpid()) == importers.end()) {
    ::close(file);
    violate(kDriverError, "the exporter names the importers", "this process is not on the list");
  }
  auto physical = std::make_shared<Physical>();
  physical->nbytes = entry.nbytes;
  physical->device = device;
  physical->file = file;
  physical->offset = entry.offset;
  physical->imported = true;
  const auto lock = memory_map().lock();
  return memory_map().adopt(std::move(physical));
}

}  // namespace ascendcl
