#include "report.h"

#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "call.h"
#include "host_memory.h"
#include "ledger.h"
#include "memory_map.h"
#include "queue.h"
#include "settings.h"

namespace ascendcl {
namespace {

std::string quoted(const std::string& plain) {
  std::string result = "\"";
  for (const char character : plain) {
    if (character == '"' || character == '\\') result += '\\';
    result += static_cast<unsigned char>(character) < 0x20 ? ' ' : character;
  }
  return result + '"';
}

std::string shown(std::uint64_t value) { return std::to_string(value); }

std::string joined(const std::vector<std::string>& parts, char open, char close) {
  std::string result(1, open);
  for (const std::string& part : parts) {
    if (result.size() > 1) result += ", ";
    result += part;
  }
  return result + close;
}

std::string object(const std::vector<std::pair<const char*, std::string>>& fields) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : fields) parts.push_back(quoted(name) + ": " + value);
  return joined(parts, '{', '}');
}

std::string devices_shown() {
  std::vector<std::string> parts;
  for (const int device : settings().devices) {
    const DeviceMemory memory = device_memory(device);
    parts.push_back(object({{"device", std::to_string(device)},
                            {"total", shown(memory.total)},
                            {"free", shown(memory.free)},
                            {"used", shown(memory.used)},
                            {"peak", shown(memory.peak)},
                            {"neighbour", shown(memory.neighbour)}}));
  }
  return joined(parts, '[', ']');
}

std::string calls_shown() {
  std::vector<std::string> parts;
  for (const auto& [name, count] : call_counts()) {
    parts.push_back(quoted(name) + ": " + object({{"calls", shown(count.calls)},
                                                  {"failed", shown(count.failed)},
                                                  {"injected", shown(count.injected)},
                                                  {"with_gil", shown(count.with_gil)}}));
  }
  return joined(parts, '{', '}');
}

struct Live {
  std::vector<std::string> reservations, handles, mappings, blocks, host;
};

std::string range(std::uint64_t address, std::uint64_t nbytes) {
  return object({{"address", shown(address)}, {"bytes", shown(nbytes)}});
}

Live live_memory() {
  Live live;
  const auto lock = memory_map().lock();
  for (const auto& [address, reservation] : memory_map().reservations()) {
    live.reservations.push_back(range(address, reservation.nbytes));
  }
  for (const auto& [handle, physical] : memory_map().handles().all()) {
    live.handles.push_back(object({{"handle", shown(handle)},
                                   {"bytes", shown(physical->nbytes)},
                                   {"owners", std::to_string(physical->owners)},
                                   {"maps", std::to_string(physical->maps)}}));
  }
  for (const auto& [address, extent] : memory_map().extents()) {
    auto& list = extent.physical != nullptr ? live.mappings : live.blocks;
    list.push_back(range(address, extent.nbytes));
  }
  for (const auto& [address, nbytes] : host_blocks()) live.host.push_back(range(address, nbytes));
  return live;
}

std::string live_shown() {
  const Live memory = live_memory();
  const QueueCounts counts = queue_counts();
  return object({{"reservations", joined(memory.reservations, '[', ']')},
                 {"handles", joined(memory.handles, '[', ']')},
                 {"mappings", joined(memory.mappings, '[', ']')},
                 {"blocks", joined(memory.blocks, '[', ']')},
                 {"host_blocks", joined(memory.host, '[', ']')},
                 {"streams", shown(counts.streams)},
                 {"events", shown(counts.events)},
                 {"graphs", shown(counts.graphs)},
                 {"pending", shown(counts.pending)}});
}

std::string violations_shown() {
  std::vector<std::string> parts;
  for (const ViolationRecord& one : violations()) {
    parts.push_back(object({{"call", quoted(one.name)}, {"rule", quoted(one.rule)}, {"text", quoted(one.text)}}));
  }
  return joined(parts, '[', ']');
}

std::string trace_shown() {
  std::vector<std::string> parts;
  for (const CallRecord& record : call_trace()) {
    std::vector<std::string> arguments;
    for (const std::uint64_t argument : record.arguments) arguments.push_back(shown(argument));
    parts.push_back(object({{"call", quoted(record.name)},
                            {"arguments", joined(arguments, '[', ']')},
                            {"code", std::to_string(record.code)},
                            {"thread", std::to_string(record.thread)},
                            {"gil", record.gil ? "true" : "false"}}));
  }
  return joined(parts, '[', ']');
}

void write_report(const std::string& path, const std::string& made) {
  if (path == "stderr") {
    std::fprintf(stderr, "ascendcl emulator report: %s\n", made.c_str());
    return;
  }
  std::string named = path;
  const auto place = named.find("%p");
  if (place != std::string::npos) named.replace(place, 2, std::to_string(::getpid()));
  std::FILE* file = std::fopen(named.c_str(), "w");
  if (file == nullptr) {
    std::fprintf(stderr, "ascendcl emulator: the report cannot be written to %s\n", named.c_str());
    return;
  }
  std::fputs(made.c_str(), file);
  std::fclose(file);
}

// Runs when the library is unloaded, which for a loaded one is the end of the process.
__attribute__((destructor)) void at_exit() {
  const std::string& path = settings().report;
  if (!path.empty()) {
    write_report(path, report());
  } else if (settings().strict && has_leaks()) {
    std::fprintf(stderr, "ascendcl emulator: left at exit: %s\n", live_shown().c_str());
  }
}

}  // namespace

std::string report() {
  return object({{"mode", settings().strict ? "\"strict\"" : "\"hardware\""},
                 {"devices", devices_shown()},
                 {"calls", calls_shown()},
                 {"live", live_shown()},
                 {"violations", violations_shown()},
                 {"trace", trace_shown()}});
}

bool has_leaks() {
  const Live memory = live_memory();
  return !memory.reservations.empty() || !memory.handles.empty() || !memory.mappings.empty() ||
         !memory.blocks.empty();
}

}  // namespace ascendcl
