// What the emulator knows, as one JSON object:
//   mode, devices [{device, total, free, used, peak, neighbour}], calls {name: {calls, failed, injected, with_gil}},
//   live {reservations, handles, mappings, blocks, host_blocks: [...], streams, events, graphs, pending: counts},
//   violations [{call, rule, text}], trace [{call, arguments, code, thread, gil}] (only while tracing)
#pragma once

#include <string>

namespace ascendcl {

std::string report();

// Whether reservations, handles, mappings or blocks are left. Pinned host memory is not counted: torch_npu keeps it.
bool has_leaks();

}  // namespace ascendcl
