#include "settings.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "abi.h"

namespace ascendcl {
namespace {

std::string read_text(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : fallback;
}

[[noreturn]] void refuse(const char* name, const std::string& value, const char* expected) {
  std::fprintf(stderr, "ascendcl emulator: %s=%s: expected %s\n", name, value.c_str(), expected);
  std::exit(64);
}

std::int64_t read_number(const char* name, std::int64_t fallback, std::int64_t least, std::int64_t most) {
  const std::string value = read_text(name, "");
  if (value.empty()) return fallback;
  char* end = nullptr;
  const std::int64_t number = std::strtoll(value.c_str(), &end, 0);
  if (*end != '\0' || number < least || number > most) refuse(name, value, "a whole number in range");
  return number;
}

bool read_choice(const char* name, const char* off, const char* on) {
  const std::string value = read_text(name, off);
  if (value != off && value != on) refuse(name, value, (std::string(off) + " or " + on).c_str());
  return value == on;
}

// The runtime shows the listed devices in the listed order and stops at the first entry that is none.
std::vector<int> visible_devices(int count) {
  std::vector<int> visible;
  const char* list = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (list == nullptr) {
    for (int device = 0; device < count; ++device) visible.push_back(device);
    return visible;
  }
  while (*list != '\0') {
    char* end = nullptr;
    const long device = std::strtol(list, &end, 10);
    if (end == list || device < 0 || device >= count) break;
    visible.push_back(static_cast<int>(device));
    list = *end == ',' ? end + 1 : end;
    if (*end != ',' && *end != '\0') break;
  }
  return visible;
}

Settings read_settings() {
  Settings read{};
  read.strict = read_choice("XLLM_ACL_EMULATOR_MODE", "hardware", "strict");
  read.hbm_bytes = static_cast<std::uint64_t>(
      read_number("XLLM_ACL_EMULATOR_HBM_BYTES", static_cast<std::int64_t>(8 * kGiB), 0, INT64_MAX));
  read.devices = visible_devices(static_cast<int>(read_number("XLLM_ACL_EMULATOR_DEVICES", 1, 0, 16)));
  read.soc = read_text("XLLM_ACL_EMULATOR_SOC", "Ascend910B3");
  read.driver = static_cast<int>(read_number("XLLM_ACL_EMULATOR_DRIVER", 26, 20, 99));
  read.lazy = read_choice("XLLM_ACL_EMULATOR_STREAMS", "immediate", "lazy");
  read.poison = static_cast<int>(read_number("XLLM_ACL_EMULATOR_POISON", -1, 0, 255));
  read.script = read_text("XLLM_ACL_EMULATOR_SCRIPT", "");
  read.trace = read_number("XLLM_ACL_EMULATOR_TRACE", 0, 0, 1) == 1;
  read.report = read_text("XLLM_ACL_EMULATOR_REPORT", "");
  read.ledger = read_text("XLLM_ACL_EMULATOR_LEDGER", "");
  return read;
}

}  // namespace

Settings& mutable_settings() {
  static Settings& read = *new Settings(read_settings());  // never destroyed: calls may come during exit
  return read;
}

const Settings& settings() { return mutable_settings(); }

}  // namespace ascendcl
