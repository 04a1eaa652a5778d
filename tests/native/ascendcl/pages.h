// The host memory behind device memory: one sparse file for handles, anonymous memory for blocks. Knows no rules.
#pragma once

#include <cstdint>

namespace ascendcl {

int pages_file();                                 // this process's file; kept open, close-on-exec
std::uint64_t take_pages(std::uint64_t nbytes);   // a fresh piece of it, poisoned if the settings say so
void close_pages(int file);  // another process's
void drop_pages(std::uint64_t offset, std::uint64_t nbytes);

// Over an address range of the window. Failure ends the process: the host, not the caller, is at fault.
void hold_range(std::uint64_t address, std::uint64_t nbytes);  // PROT_NONE, no memory behind it
void map_pages(std::uint64_t address, std::uint64_t nbytes, int file, std::uint64_t offset, bool accessible);
void map_block(std::uint64_t address, std::uint64_t nbytes);
void open_range(std::uint64_t address, std::uint64_t nbytes);  // after map_pages without access
void leave_range(std::uint64_t address, std::uint64_t nbytes);

}  // namespace ascendcl
