#include "host_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>

namespace xllm::vmm {
namespace {

constexpr std::uint64_t kUnlimited = std::uint64_t{1} << 60;  // cgroup v1 says "no limit" with a number near 2^63
constexpr std::int64_t kStatAgeNs = 50'000'000;

std::int64_t steady_now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

Fd open_read(const std::string& path) { return Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)); }

std::string pread_all(const Fd& fd) {
  std::string text(8192, '\0');
  const ssize_t size = fd ? ::pread(fd.get(), text.data(), text.size(), 0) : -1;
  text.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
  return text;
}

// The first number of the line that begins with `key` followed by ' ' or ':'.
std::optional<std::uint64_t> find_number(const std::string& text, std::string_view key) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::size_t after = at + key.size();
    if (text.compare(at, key.size(), key) == 0 && after < end && (text[after] == ' ' || text[after] == ':')) {
      return std::strtoull(text.c_str() + after + 1, nullptr, 10);
    }
    at = end + 1;
  }
  return std::nullopt;
}

// A file that holds one number; "max", garbage or nothing is unlimited.
std::uint64_t read_limit(const Fd& fd) {
  const std::string text = pread_all(fd);
  if (text.empty() || text[0] < '0' || text[0] > '9') return kUnlimited;
  return std::min<std::uint64_t>(std::strtoull(text.c_str(), nullptr, 10), kUnlimited);
}

struct Mount {
  std::string root, point;
};

// The memory controller's mount in /proc/self/mountinfo: "id parent dev ROOT POINT opts … - TYPE source SUPER_OPTS".
std::optional<Mount> find_mount(const std::string& mountinfo, bool v2) {
  std::istringstream lines(mountinfo);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream left(line), right(line.substr(dash + 3));
    std::string id, parent, device, type, source, options;
    Mount mount;
    left >> id >> parent >> device >> mount.root >> mount.point;
    right >> type >> source >> options;
    const bool has_memory = ("," + options + ",").find(",memory,") != std::string::npos;
    if (v2 ? type == "cgroup2" : (type == "cgroup" && has_memory)) return mount;
  }
  return std::nullopt;
}

// Our path in /proc/self/cgroup: "0::/path" (v2) or "N:controllers:/path" (v1).
std::optional<std::string> find_path(const std::string& cgroup, bool v2) {
  std::istringstream lines(cgroup);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (v2 ? controllers == ",," : controllers.find(",memory,") != std::string::npos) return line.substr(second + 1);
  }
  return std::nullopt;
}

std::string slurp(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

HostMemory::HostMemory(const std::string& root) : meminfo_(open_read(root + "/proc/meminfo")) {
  const std::string mountinfo = slurp(root + "/proc/self/mountinfo");
  const std::string cgroup = slurp(root + "/proc/self/cgroup");
  for (const bool v2 : {false, true}) {
    const auto mount = find_mount(mountinfo, v2);
    const auto path = find_path(cgroup, v2);
    if (!mount || !path) continue;
    // Inside a container the mount shows a part of the tree: `mount.root` is its place in the path of the process.
    std::string relative = *path;
    if (mount->root != "/" && (relative + "/").rfind(mount->root + "/", 0) == 0) relative.erase(0, mount->root.size());
    if (relative == "/") relative.clear();
    while (true) {
      const std::string folder = root + mount->point + relative + "/memory.";
      auto level = std::make_unique<Level>();
      level->limit = open_read(folder + (v2 ? "max" : "limit_in_bytes"));
      if (v2) level->throttle = open_read(folder + "high");
      level->usage = open_read(folder + (v2 ? "current" : "usage_in_bytes"));
      level->stat = open_read(folder + "stat");
      level->reclaimable = v2 ? "inactive_file" : "total_inactive_file";
      if (level->limit && level->usage) levels_.push_back(std::move(level));
      if (relative.empty()) break;
      relative.erase(relative.rfind('/') == std::string::npos ? 0 : relative.rfind('/'));
    }
  }
}

// In a container only the own group may be visible; v1 tells the smallest limit above it all the same.
void HostMemory::Level::read_stat() {
  const std::string text = pread_all(stat);
  cache = find_number(text, reclaimable).value_or(0);
  inherited = find_number(text, "hierarchical_memory_limit").value_or(kUnlimited);
  read_at_ns = steady_now();
}

MemoryReading HostMemory::read() const {
  const std::string meminfo = pread_all(meminfo_);
  MemoryReading reading{find_number(meminfo, "MemTotal").value_or(0) * 1024,
                        find_number(meminfo, "MemAvailable").value_or(0) * 1024};
  for (const auto& level : levels_) {
    if (level->read_at_ns == 0 || steady_now() - level->read_at_ns > kStatAgeNs) level->read_stat();
    std::uint64_t limit = std::min(read_limit(level->limit), level->inherited.load());
    if (level->throttle) limit = std::min(limit, read_limit(level->throttle));
    if (limit >= kUnlimited) continue;
    const std::uint64_t usage = read_limit(level->usage);
    if (usage > limit / 4 * 3) level->read_stat();  // tight: page cache is being dropped, so its size must be today's
    const std::uint64_t available = limit + level->cache;
    const std::uint64_t free = available > usage ? std::min(limit, available - usage) : 0;
    reading.total = std::min(reading.total, limit);
    reading.free = std::min(reading.free, free);
  }
  return reading;
}

}  // namespace xllm::vmm
