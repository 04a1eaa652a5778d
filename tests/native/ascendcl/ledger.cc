#include "ledger.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "settings.h"

namespace ascendcl {
namespace {

constexpr int kRows = 64;
constexpr int kDevices = 16;

struct Row {
  std::atomic<std::int64_t> process;
  std::array<std::atomic<std::uint64_t>, kDevices> bytes;
};
static_assert(sizeof(Row) == 136 && std::atomic<std::uint64_t>::is_always_lock_free);

struct Ledger {
  std::mutex mutex;
  Row* rows = nullptr;  // kRows in the shared file, or one of our own
  int num_rows = 1;
  Row* own = nullptr;
  std::array<std::uint64_t, kDevices> peak{}, neighbour{};
};

[[noreturn]] void refuse(const std::string& path, const char* what) {
  std::fprintf(stderr, "ascendcl emulator: XLLM_ACL_EMULATOR_LEDGER=%s: %s\n", path.c_str(), what);
  std::exit(64);
}

bool is_alive(std::int64_t process) {
  return ::kill(static_cast<pid_t>(process), 0) == 0 || errno == EPERM;
}

Row* claim_row(Row* rows) {
  const std::int64_t self = ::getpid();
  for (int index = 0; index < kRows; ++index) {
    std::int64_t owner = rows[index].process.load();
    if (owner != 0 && is_alive(owner)) continue;
    if (!rows[index].process.compare_exchange_strong(owner, self)) continue;
    for (auto& bytes : rows[index].bytes) bytes = 0;
    return &rows[index];
  }
  return nullptr;
}

void open_ledger(Ledger& ledger, const std::string& path) {
  if (path.empty()) {
    ledger.rows = ledger.own = new Row{};
    ledger.own->process = ::getpid();
    return;
  }
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  constexpr std::size_t kBytes = sizeof(Row) * kRows;
  if (file < 0 || ::ftruncate(file, kBytes) != 0) refuse(path, "cannot be opened for writing");
  void* mapped = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (mapped == MAP_FAILED) refuse(path, "cannot be mapped");
  ledger.rows = static_cast<Row*>(mapped);
  ledger.num_rows = kRows;
  ledger.own = claim_row(ledger.rows);
  if (ledger.own == nullptr) refuse(path, "all its rows belong to living processes");
}

Ledger& ledger() {
  static Ledger& kept = *[] {
    auto* made = new Ledger;  // never destroyed: calls may come during exit
    open_ledger(*made, settings().ledger);
    return made;
  }();
  return kept;
}

std::uint64_t taken(const Ledger& ledger, int device) {
  std::uint64_t sum = ledger.neighbour[device];
  for (int index = 0; index < ledger.num_rows; ++index) {
    const Row& row = ledger.rows[index];
    const std::int64_t owner = row.process;
    if (&row == ledger.own || (owner != 0 && is_alive(owner))) sum += row.bytes[device];
  }
  return sum;
}

}  // namespace

bool take_memory(int device, std::uint64_t nbytes) {
  Ledger& kept = ledger();
  const std::lock_guard lock(kept.mutex);
  if (nbytes > settings().hbm_bytes) return false;
  kept.own->bytes[device] += nbytes;  // added first, then checked: two processes cannot both get the last bytes
  if (taken(kept, device) > settings().hbm_bytes) {
    kept.own->bytes[device] -= nbytes;
    return false;
  }
  kept.peak[device] = std::max<std::uint64_t>(kept.peak[device], kept.own->bytes[device]);
  return true;
}

void give_memory(int device, std::uint64_t nbytes) {
  const std::lock_guard lock(ledger().mutex);
  ledger().own->bytes[device] -= nbytes;
}

void move_neighbour(int device, std::int64_t nbytes) {
  Ledger& kept = ledger();
  const std::lock_guard lock(kept.mutex);
  device = std::clamp(device, 0, kDevices - 1);
  std::uint64_t& neighbour = kept.neighbour[device];
  const std::uint64_t used = taken(kept, device);
  const std::uint64_t free = settings().hbm_bytes - std::min(settings().hbm_bytes, used);
  if (nbytes >= 0) {
    neighbour += std::min(static_cast<std::uint64_t>(nbytes), free);
  } else {
    neighbour -= std::min(static_cast<std::uint64_t>(-nbytes), neighbour);
  }
}

DeviceMemory device_memory(int device) {
  Ledger& kept = ledger();
  const std::lock_guard lock(kept.mutex);
  const std::uint64_t total = settings().hbm_bytes;
  const std::uint64_t used = taken(kept, device);
  return {total, total - std::min(total, used), kept.own->bytes[device], kept.peak[device], kept.neighbour[device]};
}

}  // namespace ascendcl
