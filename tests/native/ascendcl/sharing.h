// Handles of one process in another: the exporter keeps a table in the first bytes of its memory file, the importer
// opens that file through /proc. Knows no addresses.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ascendcl {

// A number that another process can import; only one per handle. `restricted`: only processes of allow_import may.
std::uint64_t export_handle(void* handle, bool restricted);
void allow_import(std::uint64_t shareable, const std::int32_t* processes, std::size_t count);
void* import_handle(std::uint64_t shareable, int device);

}  // namespace ascendcl
