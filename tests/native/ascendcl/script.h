// What a test makes happen: faults, delays and a neighbour on the device. Knows calls only by name.
//
// Lines, separated by ';' or newlines; N counts the calls of FUNCTION from now on, the next one is 1:
//   inject FUNCTION N CODE [COUNT]        calls N ... N+COUNT-1 (default 1) do nothing and return CODE
//   delay FUNCTION MICROSECONDS           every call waits first, without a lock; 0 ends it
//   delay copy MICROSECONDS               a running copy holds its pages that much longer
//   delay task MICROSECONDS               queued work runs no earlier than this after it was queued
//   neighbour now BYTES [DEVICE]          another process takes (negative: gives back) device memory
//   neighbour FUNCTION N BYTES [DEVICE]   ... just before call N
//   total BYTES                           every device has this much memory from now on
//   streams lazy|immediate, mode strict|hardware, driver MAJOR, poison BYTE|none, devices COUNT    as the settings
#pragma once

#include <cstdint>
#include <string>

namespace ascendcl {

// Reads and applies the lines; returns "" or a sentence that names the line it cannot read (lines before it stand).
std::string apply_script(const std::string& lines);

// Forgets faults, delays and neighbours still to come.
void clear_script();

// The start of a call: waits, lets neighbours move, and returns the code to fail with, or 0.
int begin_scripted(const std::string& function);

// Microseconds of "delay copy" and "delay task".
std::uint64_t scripted_delay(const std::string& name);

}  // namespace ascendcl
