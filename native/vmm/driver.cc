#include "driver.h"

#include <cstring>
#include <sstream>
#include <utility>

namespace xllm::vmm {

const char* verb_name(Verb verb) { return kVerbNames[static_cast<std::size_t>(verb)]; }

Verb verb_from_name(const std::string& name) {
  for (std::size_t i = 0; i < kVerbNames.size(); ++i) {
    if (name == kVerbNames[i]) return static_cast<Verb>(i);
  }
  throw std::invalid_argument("no driver verb is called '" + name + "'");
}

Error::Error(Verb verb_in, int code_in, Address address_in, std::string text_in)
    : std::runtime_error(std::string(verb_name(verb_in)) + ": " + text_in),
      verb(verb_in),
      code(code_in),
      address(address_in),
      text(std::move(text_in)) {}

std::map<std::string, std::uint64_t> Driver::counts() const {
  std::map<std::string, std::uint64_t> result;
  for (std::size_t i = 0; i < kVerbNames.size(); ++i) {
    result[kVerbNames[i]] = calls_[i].load();
    result[std::string(kVerbNames[i]) + "_pages"] = pages_[i].load();
  }
  return result;
}

void Driver::reset_counts() {
  for (auto& counter : calls_) counter = 0;
  for (auto& counter : pages_) counter = 0;
}

std::string Driver::last_failure() const {
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

void Driver::note_failure(Verb verb, int code, Address address, const std::string& text) {
  std::ostringstream line;
  line << verb_name(verb);
  if (address != 0) line << " at 0x" << std::hex << address << std::dec;
  line << ": " << text << " (code " << code << ")";
  const std::lock_guard lock(failure_mutex_);
  failure_ = line.str();
}

std::uint64_t Driver::count_call(Verb verb, std::uint64_t pages) const {
  ++calls_[static_cast<std::size_t>(verb)];
  return pages_[static_cast<std::size_t>(verb)].fetch_add(pages);
}

}  // namespace xllm::vmm
