// Graphs as the program calls them: capture and replay.
#include "call.h"
#include "device.h"
#include "queue.h"
#include "vmm.h"

using namespace ascendcl;  // NOLINT: the exported names follow

ASCENDCL_API int aclmdlRICaptureBegin(void* stream, int mode) {
  return call("aclmdlRICaptureBegin", {stream, mode}, [&] { begin_capture(find_stream(stream), mode); });
}

ASCENDCL_API int aclmdlRICaptureEnd(void* stream, void** graph) {
  return call("aclmdlRICaptureEnd", {stream}, [&] {
    check_given(graph, "the result");
    *graph = nullptr;
    *graph = end_capture(find_stream(stream));
    trace_output(*graph);
  });
}

ASCENDCL_API int aclmdlRICaptureGetInfo(void* stream, int* status, void** graph) {
  return call("aclmdlRICaptureGetInfo", {stream}, [&] {
    check_given(status, "the result");
    const auto capture = find_stream(stream)->capture;
    *status = capture == nullptr ? kCaptureNone : capture->is_broken ? kCaptureInvalidated : kCaptureActive;
    if (graph != nullptr) *graph = capture == nullptr ? nullptr : capture->handle;
  });
}

ASCENDCL_API int aclmdlRIGetId(void* graph, std::uint32_t* id) {
  return call("aclmdlRIGetId", {graph}, [&] {
    check_given(id, "the result");
    *id = find_graph(graph)->id;
  });
}

ASCENDCL_API int aclmdlRICaptureThreadExchangeMode(int* mode) {
  return call("aclmdlRICaptureThreadExchangeMode", {mode}, [&] {
    check_given(mode, "the mode");
    *mode = exchange_capture_mode(*mode);
  });
}

ASCENDCL_API int aclmdlRIExecuteAsync(void* graph, void* stream) {
  return call("aclmdlRIExecuteAsync", {graph, stream}, [&] { replay(find_graph(graph), find_stream(stream)); });
}

ASCENDCL_API int aclmdlRIDestroy(void* graph) {
  return call("aclmdlRIDestroy", {graph}, [&] { destroy_graph(graph); });
}

ASCENDCL_API int aclmdlRIDebugPrint(void* graph) {
  return call("aclmdlRIDebugPrint", {graph}, [&] { find_graph(graph); });
}

ASCENDCL_API int aclmdlRICaptureTaskGrpBegin(void* stream) {
  return call("aclmdlRICaptureTaskGrpBegin", {stream}, [&] { begin_group(find_stream(stream)); });
}

ASCENDCL_API int aclmdlRICaptureTaskGrpEnd(void* stream, void** group) {
  return call("aclmdlRICaptureTaskGrpEnd", {stream}, [&] {
    check_given(group, "the result");
    *group = end_group(find_stream(stream));
  });
}

ASCENDCL_API int aclmdlRICaptureTaskUpdateBegin(void* stream, void* group) {
  return call("aclmdlRICaptureTaskUpdateBegin", {stream, group}, [&] { begin_update(find_stream(stream), group); });
}

ASCENDCL_API int aclmdlRICaptureTaskUpdateEnd(void* stream) {
  return call("aclmdlRICaptureTaskUpdateEnd", {stream}, [&] { end_update(find_stream(stream)); });
}
