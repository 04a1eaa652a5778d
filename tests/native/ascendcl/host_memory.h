// Host memory the device may read by itself: of aclrtMallocHost, and registered. Knows no copies.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace ascendcl {

bool is_pinned(const void* address, std::uint64_t nbytes);
std::vector<std::pair<std::uint64_t, std::uint64_t>> host_blocks();  // address, bytes

}  // namespace ascendcl
