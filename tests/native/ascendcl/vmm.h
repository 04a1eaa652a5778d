// Checks that the virtual memory calls of several releases share. Each breaks off with a violation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.h"

namespace ascendcl {

void check_given(const void* pointer, const char* what);
void check_flags(std::uint64_t flags, std::uint64_t most);

// Checks the properties; returns the page they ask for: 2 MiB or 1 GiB.
std::uint64_t page_bytes_of(const PhysicalProperties* properties);

void map_memory(void* address, std::size_t nbytes, std::size_t offset, void* handle, std::uint64_t flags,
                bool accessible);

}  // namespace ascendcl
