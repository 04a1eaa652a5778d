// Streams and events as the program calls them.
#include "call.h"
#include "device.h"
#include "queue.h"
#include "vmm.h"

using namespace ascendcl;  // NOLINT: the exported names follow

namespace {

void make_stream(void** stream) {
  check_given(stream, "the result");
  *stream = create_stream(current_context()->device);
}

void make_event(void** event) {
  check_given(event, "the result");
  current_context();
  *event = create_event();
}

}  // namespace

ASCENDCL_API int aclrtCreateStream(void** stream) {
  return call("aclrtCreateStream", {stream}, [&] { make_stream(stream); });
}

ASCENDCL_API int aclrtCreateStreamWithConfig(void** stream, std::uint32_t priority, std::uint32_t flags) {
  return call("aclrtCreateStreamWithConfig", {stream, priority, flags}, [&] { make_stream(stream); });
}

ASCENDCL_API int aclrtDestroyStream(void* stream) {
  return call("aclrtDestroyStream", {stream}, [&] {
    check_given(stream, "the stream");
    destroy_stream(stream, false);
  });
}

ASCENDCL_API int aclrtDestroyStreamForce(void* stream) {
  return call("aclrtDestroyStreamForce", {stream}, [&] {
    check_given(stream, "the stream");
    destroy_stream(stream, true);
  });
}

ASCENDCL_API int aclrtSynchronizeStream(void* stream) {
  return call("aclrtSynchronizeStream", {stream}, [&] {
    const auto queue = find_stream(stream);
    forbid_while_capturing("aclrtSynchronizeStream");
    synchronize(queue, -1);
  });
}

ASCENDCL_API int aclrtSynchronizeStreamWithTimeout(void* stream, std::int32_t milliseconds) {
  return call("aclrtSynchronizeStreamWithTimeout", {stream, milliseconds}, [&] {
    const auto queue = find_stream(stream);
    forbid_while_capturing("aclrtSynchronizeStreamWithTimeout");
    synchronize(queue, milliseconds);
  });
}

ASCENDCL_API int aclrtStreamQuery(void* stream, int* status) {
  return call("aclrtStreamQuery", {stream}, [&] {
    check_given(status, "the result");
    *status = is_idle(find_stream(stream)) ? kStreamComplete : kStreamNotReady;
  });
}

ASCENDCL_API int aclrtCreateEvent(void** event) {
  return call("aclrtCreateEvent", {event}, [&] { make_event(event); });
}

ASCENDCL_API int aclrtCreateEventWithFlag(void** event, std::uint32_t flags) {
  return call("aclrtCreateEventWithFlag", {event, flags}, [&] { make_event(event); });
}

ASCENDCL_API int aclrtCreateEventExWithFlag(void** event, std::uint32_t flags) {
  return call("aclrtCreateEventExWithFlag", {event, flags}, [&] { make_event(event); });
}

ASCENDCL_API int aclrtDestroyEvent(void* event) {
  return call("aclrtDestroyEvent", {event}, [&] { destroy_event(event); });
}

ASCENDCL_API int aclrtRecordEvent(void* event, void* stream) {
  return call("aclrtRecordEvent", {event, stream}, [&] { record_event(find_event(event), find_stream(stream)); });
}

ASCENDCL_API int aclrtResetEvent(void* event, void* stream) {
  return call("aclrtResetEvent", {event, stream}, [&] {
    find_event(event);
    find_stream(stream);
  });
}

ASCENDCL_API int aclrtStreamWaitEvent(void* stream, void* event) {
  return call("aclrtStreamWaitEvent", {stream, event}, [&] { wait_event(find_stream(stream), find_event(event)); });
}

ASCENDCL_API int aclrtSynchronizeEvent(void* event) {
  return call("aclrtSynchronizeEvent", {event}, [&] {
    const auto found = find_event(event);
    forbid_while_capturing("aclrtSynchronizeEvent");
    synchronize_event(found);
  });
}

ASCENDCL_API int aclrtQueryEventStatus(void* event, int* status) {
  return call("aclrtQueryEventStatus", {event}, [&] {
    check_given(status, "the result");
    *status = has_run(find_event(event)) ? kRecordComplete : kRecordNotReady;
  });
}

ASCENDCL_API int aclrtQueryEvent(void* event, int* status) {
  return call("aclrtQueryEvent", {event}, [&] {
    check_given(status, "the result");
    *status = has_run(find_event(event)) ? kWaitComplete : kWaitNotReady;
  });
}

ASCENDCL_API int aclrtQueryEventWaitStatus(void* event, int* status) {
  return call("aclrtQueryEventWaitStatus", {event}, [&] {
    check_given(status, "the result");
    const auto found = find_event(event);
    *status = found->stream == nullptr || has_run(found) ? kWaitComplete : kWaitNotReady;
  });
}

ASCENDCL_API int aclrtEventElapsedTime(float* milliseconds, void* start, void* end) {
  return call("aclrtEventElapsedTime", {start, end}, [&] {
    check_given(milliseconds, "the result");
    const auto first = find_event(start), last = find_event(end);
    if (!has_run(first) || !has_run(last)) fail(kInvalidValue, "both events have to be recorded and run");
    *milliseconds = std::chrono::duration<float, std::milli>(last->time - first->time).count();
  });
}

ASCENDCL_API int aclrtEventGetTimestamp(void* event, std::uint64_t* microseconds) {
  return call("aclrtEventGetTimestamp", {event}, [&] {
    check_given(microseconds, "the result");
    const auto found = find_event(event);
    if (!has_run(found)) fail(kInvalidValue, "the event has to be recorded and run");
    const auto since = found->time.time_since_epoch();
    *microseconds = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(since).count());
  });
}

ASCENDCL_API int aclrtLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  return call("aclrtLaunchHostFunc", {stream, argument}, [&] {
    if (function == nullptr) violate(kBadArgument, "no null pointers", "the function is null");
    enqueue(find_stream(stream), {"aclrtLaunchHostFunc", {}, [=] { function(argument); }});
  });
}

ASCENDCL_API int aclrtLaunchCallback(void (*function)(void*), void* argument, int block_type, void* stream) {
  return call("aclrtLaunchCallback", {argument, block_type, stream}, [&] {
    if (function == nullptr) violate(kBadArgument, "no null pointers", "the function is null");
    enqueue(find_stream(stream), {"aclrtLaunchCallback", {}, [=] { function(argument); }});
  });
}

ASCENDCL_API int aclrtStreamGetId(void* stream, std::int32_t* id) {
  return call("aclrtStreamGetId", {stream}, [&] {
    check_given(id, "the result");
    find_stream(stream);
    *id = static_cast<std::int32_t>(reinterpret_cast<std::uintptr_t>(stream) >> 4 & 0xFFFF);
  });
}
