// How much of each device's memory is taken, and by whom. Knows bytes, not pages or addresses.
//
// Without a file the ledger is the process's own; with one (settings.ledger) all processes that name the same file
// share the devices: each has a row, and the row of a process that died counts no more. The file is `kRows` rows of
// { int64 process id, 0 = free; uint64 bytes[16] }, so a test can take memory from a running server by adding a row.
#pragma once

#include <cstdint>

namespace ascendcl {

// Takes memory of the device, or returns false where it has not that much left.
bool take_memory(int device, std::uint64_t nbytes);
void give_memory(int device, std::uint64_t nbytes);

// The scripted neighbour takes (or, negative, gives back) memory; it takes no more than there is, and gives no more
// than it has.
void move_neighbour(int device, std::int64_t nbytes);

struct DeviceMemory {
  std::uint64_t total, free;
  std::uint64_t used, peak;  // by this process
  std::uint64_t neighbour;   // by the scripted neighbour
};

DeviceMemory device_memory(int device);

}  // namespace ascendcl
