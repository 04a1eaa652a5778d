// The emulator's own face, beside ACL's: what tests call. tests/ascendcl.py wraps it.
#include <cstring>

#include "call.h"
#include "queue.h"
#include "report.h"
#include "script.h"
#include "vmm.h"

using namespace ascendcl;  // NOLINT: the exported names follow

// Applies script lines (script.h); null if all were read, else a sentence, valid until the thread's next call.
ASCENDCL_API const char* ascendcl_emulator_script(const char* lines) {
  thread_local std::string refused;
  refused = apply_script(lines);
  return refused.empty() ? nullptr : refused.c_str();
}

// The report (report.h), valid until the thread's next call.
ASCENDCL_API const char* ascendcl_emulator_report() {
  thread_local std::string made;
  made = report();
  return made.c_str();
}

ASCENDCL_API void ascendcl_emulator_trace(int on) { set_trace(on != 0); }

// Forgets counts, trace, violations, script and device faults; memory, streams and graphs stay.
ASCENDCL_API void ascendcl_emulator_reset() {
  clear_script();
  reset_calls();
  forget_faults();
}

// Queues a kernel that touches `count` spans (address and bytes, in turn) and calls `function`, which may be null.
ASCENDCL_API int ascendcl_emulator_launch(void* stream, const std::uint64_t* spans, std::size_t count,
                                          void (*function)(void*), void* argument) {
  return call("ascendcl_emulator_launch", {stream, count}, [&] {
    Task task{"a kernel"};
    for (std::size_t index = 0; index < count; ++index) task.spans.push_back({spans[2 * index], spans[2 * index + 1]});
    if (function != nullptr) task.work = [=] { function(argument); };
    enqueue(find_stream(stream), std::move(task));
  });
}
