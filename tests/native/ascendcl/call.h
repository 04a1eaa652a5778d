// One call into the library: counted, traced, perhaps made to fail, and its outcome turned into the vendor's code.
// Knows nothing of what the calls do.
//
//   ASCENDCL_API int aclrtUnmapMem(void* address) {
//     return call("aclrtUnmapMem", {address}, [&] { ... fail(...) or violate(...) or return ... });
//   }
//
// fail: the world is at fault (no memory, no such device). violate: the caller broke a rule of the contract; in strict
// mode this ends the process with the text, in hardware mode the caller gets the code and the report keeps the text.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "abi.h"

namespace ascendcl {

// A number or a pointer, as the trace keeps it.
struct Argument {
  std::uint64_t value;
  Argument(const void* pointer) : value(reinterpret_cast<std::uintptr_t>(pointer)) {}  // NOLINT: meant to convert
  template <class Number, class = std::enable_if_t<std::is_integral_v<Number>>>
  Argument(Number number) : value(static_cast<std::uint64_t>(number)) {}  // NOLINT: meant to convert
};

struct Failure {
  int code;
  std::string rule;  // empty: nobody broke a rule
  std::string text;
};

// printf into a string.
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

[[noreturn]] void fail(int code, std::string text);
[[noreturn]] void violate(int code, const char* rule, std::string text);

// Ends the process: what strict mode does with a broken rule. `name` is the call during which it was seen.
[[noreturn]] void abort_with(const std::string& name, const std::string& rule, const std::string& text);

// Keeps a broken rule for the report; in strict mode ends the process.
void note_violation(const std::string& name, const std::string& rule, const std::string& text);

// Runs `body` as the call `name`. Thread-safe; `body` runs without any lock of this file.
int call(const char* name, std::initializer_list<Argument> arguments, const std::function<void()>& body);

// What the trace shows behind the arguments of this thread's call, for a call that hands something out.
void trace_output(Argument output);

// The text of this thread's last failed call, cleared by reading; null if there is none.
const char* take_recent_text();

struct CallCount {
  std::uint64_t calls;
  std::uint64_t failed;
  std::uint64_t injected;
  std::uint64_t with_gil;  // made by a thread that held Python's global interpreter lock
};

struct CallRecord {
  std::string name;
  std::vector<std::uint64_t> arguments;
  int code;
  long thread;
  bool gil;
};

struct ViolationRecord {
  std::string name, rule, text;
};

std::vector<std::pair<std::string, CallCount>> call_counts();  // sorted by name, only what was called
std::vector<CallRecord> call_trace();
std::vector<ViolationRecord> violations();
void reset_calls();  // counts, trace and violations; a script stays
void set_trace(bool on);

}  // namespace ascendcl
