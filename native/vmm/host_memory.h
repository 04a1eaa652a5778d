// How much memory this process may still use: the machine's, and every cgroup limit (v1 or v2) above it.
//
// Files are opened once and read with pread, so a reading costs a few microseconds and any thread may take one. Page
// cache counts as free, since the kernel drops it for us; its size is the dearest to read, and while a group is far from
// its limit, where nothing is dropped, it is taken from a reading at most 50 ms old.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace xllm::vmm {

// An owned file descriptor; -1 is none.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

struct MemoryReading {
  std::uint64_t total;  // the smallest of RAM and the cgroup limits
  std::uint64_t free;   // the smallest of MemAvailable and (limit - usage + page cache) at every level
};

class HostMemory {
 public:
  // `root` is prefixed to every path: a test's own /proc and /sys.
  explicit HostMemory(const std::string& root = "");
  MemoryReading read() const;

 private:
  struct Level {
    Fd limit, throttle, usage, stat;  // `throttle`, v2 only: above it the kernel slows us down, so it is a limit too
    const char* reclaimable;          // the line of `stat` that counts page cache the kernel would give up first
    // what `stat` said last, and when by the steady clock (0: never)
    std::atomic<std::uint64_t> cache{0}, inherited{0};
    std::atomic<std::int64_t> read_at_ns{0};

    void read_stat();
  };

  Fd meminfo_;
  std::vector<std::unique_ptr<Level>> levels_;
};

}  // namespace xllm::vmm
