#include "script.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <vector>

#include "ledger.h"
#include "settings.h"

namespace ascendcl {
namespace {

struct Fault {
  std::uint64_t first, last;  // calls, counted from the start of the process
  int code;
};

struct Move {
  std::uint64_t call;
  std::int64_t bytes;
  int device;
};

struct Script {
  std::mutex mutex;
  std::map<std::string, std::uint64_t> calls;
  std::map<std::string, std::vector<Fault>> faults;
  std::map<std::string, std::vector<Move>> moves;
  std::map<std::string, std::uint64_t> delays;
};

Script& script() {
  static Script& kept = *new Script;  // never destroyed: calls may come during exit
  return kept;
}

bool read_inject(std::istringstream& words) {
  std::string function;
  std::uint64_t first = 0, count = 1;
  int code = 0;
  if (!(words >> function >> first >> code) || first == 0) return false;
  if (!(words >> count)) count = 1;
  const std::lock_guard lock(script().mutex);
  const std::uint64_t call = script().calls[function] + first;
  script().faults[function].push_back({call, call + count - 1, code});
  return true;
}

bool read_neighbour(std::istringstream& words) {
  std::string function;
  Move move{0, 0, 0};
  if (!(words >> function)) return false;
  if (function != "now" && (!(words >> move.call) || move.call == 0)) return false;
  if (!(words >> move.bytes)) return false;
  if (!(words >> move.device)) move.device = 0;
  if (function == "now") {
    move_neighbour(move.device, move.bytes);
    return true;
  }
  const std::lock_guard lock(script().mutex);
  move.call += script().calls[function];
  script().moves[function].push_back(move);
  return true;
}

bool read_delay(std::istringstream& words) {
  std::string function;
  std::uint64_t microseconds = 0;
  if (!(words >> function >> microseconds)) return false;
  const std::lock_guard lock(script().mutex);
  script().delays[function] = microseconds;
  return true;
}

bool read_setting(const std::string& verb, std::istringstream& words) {
  Settings& changed = mutable_settings();
  std::string value;
  if (!(words >> value)) return false;
  const bool is_number = value.find_first_not_of("0123456789") == std::string::npos;
  if (verb == "total" && is_number) {
    changed.hbm_bytes = std::stoull(value);
  } else if (verb == "devices" && is_number) {
    changed.devices.resize(std::stoull(value));
    std::iota(changed.devices.begin(), changed.devices.end(), 0);
  } else if (verb == "driver" && is_number) {
    changed.driver = std::stoi(value);
  } else if (verb == "poison" && (is_number || value == "none")) {
    changed.poison = is_number ? std::stoi(value) & 0xFF : -1;
  } else if (verb == "streams" && (value == "lazy" || value == "immediate")) {
    changed.lazy = value == "lazy";
  } else if (verb == "mode" && (value == "strict" || value == "hardware")) {
    changed.strict = value == "strict";
  } else {
    return false;
  }
  return true;
}

bool apply_line(const std::string& line) {
  std::istringstream words(line);
  std::string verb;
  if (!(words >> verb)) return true;  // an empty line
  if (verb == "inject") return read_inject(words);
  if (verb == "delay") return read_delay(words);
  if (verb == "neighbour") return read_neighbour(words);
  return read_setting(verb, words);
}

void read_environment() {
  const std::string refused = apply_script(settings().script);
  if (refused.empty()) return;
  std::fprintf(stderr, "ascendcl emulator: XLLM_ACL_EMULATOR_SCRIPT: %s\n", refused.c_str());
  std::exit(64);
}

void move_neighbours(const std::vector<Move>& moves, std::uint64_t call) {
  for (const Move& move : moves) {
    if (move.call == call) move_neighbour(move.device, move.bytes);
  }
}

}  // namespace

std::string apply_script(const std::string& lines) {
  std::istringstream by_newline(lines);
  for (std::string part; std::getline(by_newline, part);) {
    std::istringstream by_semicolon(part);
    for (std::string line; std::getline(by_semicolon, line, ';');) {
      if (!apply_line(line)) return "cannot read '" + line + "'; script.h has the grammar";
    }
  }
  return "";
}

void clear_script() {
  const std::lock_guard lock(script().mutex);
  script().faults.clear();
  script().moves.clear();
  script().delays.clear();
}

int begin_scripted(const std::string& function) {
  static std::once_flag environment_read;
  std::call_once(environment_read, read_environment);
  std::uint64_t microseconds = 0;
  std::vector<Move> moves;
  int code = 0;
  std::uint64_t call = 0;
  {
    const std::lock_guard lock(script().mutex);
    call = ++script().calls[function];
    if (const auto found = script().delays.find(function); found != script().delays.end()) microseconds = found->second;
    if (const auto found = script().moves.find(function); found != script().moves.end()) moves = found->second;
    for (const Fault& fault : script().faults[function]) {
      if (fault.first <= call && call <= fault.last) code = fault.code;
    }
  }
  if (microseconds != 0) ::usleep(static_cast<useconds_t>(microseconds));
  move_neighbours(moves, call);
  return code;
}

std::uint64_t scripted_delay(const std::string& name) {
  const std::lock_guard lock(script().mutex);
  const auto found = script().delays.find(name);
  return found == script().delays.end() ? 0 : found->second;
}

}  // namespace ascendcl
