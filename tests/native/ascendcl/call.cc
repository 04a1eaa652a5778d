#include "call.h"

#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include "script.h"
#include "settings.h"

namespace ascendcl {
namespace {

constexpr std::size_t kLongestTrace = 500'000;

struct Journal {
  std::mutex mutex;
  std::map<std::string, CallCount> counts;
  std::vector<CallRecord> trace;
  std::vector<ViolationRecord> violations;
  bool tracing = settings().trace;
};

Journal& journal() {
  static Journal& kept = *new Journal;  // never destroyed: calls may come during exit
  return kept;
}

thread_local std::string recent_text;
thread_local std::string handed_out_text;
thread_local std::vector<std::uint64_t> outputs;

// Looked up at run time: the library is loaded by programs without a Python too.
bool holds_gil() {
  using Question = int (*)();
  static const auto is_initialised = reinterpret_cast<Question>(::dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  static const auto is_held = reinterpret_cast<Question>(::dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return is_initialised != nullptr && is_held != nullptr && is_initialised() != 0 && is_held() != 0;
}

void note(const char* name, std::initializer_list<Argument> arguments, int code, bool injected) {
  const bool gil = holds_gil();
  Journal& kept = journal();
  const std::lock_guard lock(kept.mutex);
  CallCount& count = kept.counts[name];
  ++count.calls;
  count.failed += code != kSuccess;
  count.injected += injected;
  count.with_gil += gil;
  if (!kept.tracing || kept.trace.size() >= kLongestTrace) return;
  CallRecord record{name, {}, code, ::syscall(SYS_gettid), gil};
  for (const Argument& argument : arguments) record.arguments.push_back(argument.value);
  record.arguments.insert(record.arguments.end(), outputs.begin(), outputs.end());
  kept.trace.push_back(std::move(record));
}

}  // namespace

std::string text(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  char* made = nullptr;
  const int length = ::vasprintf(&made, format, arguments);
  va_end(arguments);
  if (length < 0) return format;
  std::string result(made, static_cast<std::size_t>(length));
  std::free(made);
  return result;
}

void fail(int code, std::string text) { throw Failure{code, "", std::move(text)}; }

void violate(int code, const char* rule, std::string text) { throw Failure{code, rule, std::move(text)}; }

void abort_with(const std::string& name, const std::string& rule, const std::string& text) {
  std::fprintf(stderr, "ascendcl emulator: %s broke the rule '%s': %s\n", name.c_str(), rule.c_str(), text.c_str());
  std::fflush(stderr);
  std::abort();
}

void note_violation(const std::string& name, const std::string& rule, const std::string& text) {
  if (settings().strict) abort_with(name, rule, text);
  const std::lock_guard lock(journal().mutex);
  journal().violations.push_back({name, rule, text});
}

int call(const char* name, std::initializer_list<Argument> arguments, const std::function<void()>& body) {
  outputs.clear();
  int code = begin_scripted(name);
  const bool injected = code != kSuccess;
  if (injected) recent_text = text("%s: %d was injected by the script", name, code);
  try {
    if (!injected) body();
  } catch (const Failure& failure) {
    code = failure.code;
    recent_text = text("%s: %s [%d]", name, failure.text.c_str(), code);
    if (!failure.rule.empty()) note_violation(name, failure.rule, failure.text);
  }
  note(name, arguments, code, injected);
  return code;
}

void trace_output(Argument output) { outputs.push_back(output.value); }

const char* take_recent_text() {
  handed_out_text = std::move(recent_text);
  recent_text.clear();
  return handed_out_text.empty() ? nullptr : handed_out_text.c_str();
}

std::vector<std::pair<std::string, CallCount>> call_counts() {
  const std::lock_guard lock(journal().mutex);
  return {journal().counts.begin(), journal().counts.end()};
}

std::vector<CallRecord> call_trace() {
  const std::lock_guard lock(journal().mutex);
  return journal().trace;
}

std::vector<ViolationRecord> violations() {
  const std::lock_guard lock(journal().mutex);
  return journal().violations;
}

void reset_calls() {
  const std::lock_guard lock(journal().mutex);
  journal().counts.clear();
  journal().trace.clear();
  journal().violations.clear();
}

void set_trace(bool on) {
  const std::lock_guard lock(journal().mutex);
  journal().tracing = on;
}

}  // namespace ascendcl
