// How much memory this process may still use: the machine's, and every cgroup limit (v1 or v2) above it.
//
// Files are opened once and read with pread, so a reading costs a few microseconds and any thread may take one.
#pragma once

#include <cstdint>
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
  std::uint64_t free;   // the smallest of MemAvailable and (limit - usage) at every level
};

class HostMemory {
 public:
  // `root` is prefixed to every path: a test's own /proc and /sys.
  explicit HostMemory(const std::string& root = "");
  MemoryReading read() const;

 private:
  struct Level {
    Fd limit, usage, stat;
    const char* reclaimable;  // the line of `stat` that counts page cache the kernel would give up first
  };

  Fd meminfo_;
  std::vector<Level> levels_;
};

}  // namespace xllm::vmm
