// Graphs: what was queued on a capturing stream, kept to be queued again.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "call.h"
#include "queue_state.h"

namespace ascendcl {
namespace {

thread_local int thread_mode = kCaptureGlobal;

}  // namespace

void begin_capture(const std::shared_ptr<Stream>& stream, int mode) {
  const std::lock_guard lock(queues().mutex);
  if (stream->is_default) violate(kCaptureForbids, "the default stream is not captured", "it is the default stream");
  if (stream->capture != nullptr) violate(kStreamCaptured, "one capture at a time", "the stream is being captured");
  if (mode < kCaptureGlobal || mode > kCaptureRelaxed) fail(kBadArgument, text("capture mode %d", mode));
  auto graph = std::make_shared<Graph>();
  graph->mode = mode;
  graph->thread = ::syscall(SYS_gettid);
  graph->id = queues().next_graph++;
  graph->streams.push_back(stream);
  graph->handle = queues().graphs.add(graph);
  stream->capture = graph;
  queues().capturing = graph;
}

void* end_capture(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(queues().mutex);
  const std::shared_ptr<Graph> graph = stream->capture;
  if (graph == nullptr) violate(kStreamNotCaptured, "capture ends where it began", "the stream is not captured");
  if (graph->streams.front() != stream) violate(kCaptureUnmatched, "capture ends where it began", "another stream");
  if (graph->mode != kCaptureRelaxed && graph->thread != ::syscall(SYS_gettid)) {
    violate(kCaptureWrongThread, "capture ends in the thread that began it", "another thread");
  }
  for (const auto& joined : graph->streams) joined->capture = nullptr;
  queues().capturing = nullptr;
  if (graph->is_broken) {
    queues().graphs.remove(graph->handle);
    fail(kCaptureForbids, "a forbidden call broke the capture");
  }
  return graph->handle;
}

std::shared_ptr<Graph> find_graph(void* handle) {
  const std::lock_guard lock(queues().mutex);
  std::shared_ptr<Graph> graph = queues().graphs.find(handle);
  if (graph == nullptr) violate(kBadHandle, "handles are alive", text("graph %p is none", handle));
  return graph;
}

void destroy_graph(void* handle) {
  const std::shared_ptr<Graph> graph = find_graph(handle);
  const std::lock_guard lock(queues().mutex);
  std::vector<const void*> groups;
  for (const auto& [key, group] : queues().groups.all()) {
    if (group->graph == graph) groups.push_back(reinterpret_cast<const void*>(key));
  }
  for (const void* group : groups) queues().groups.remove(group);
  queues().graphs.remove(handle);
}

void replay(const std::shared_ptr<Graph>& graph, const std::shared_ptr<Stream>& stream) {
  for (const Task& task : graph->tasks) enqueue(stream, task);
}

void begin_group(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(queues().mutex);
  if (stream->capture == nullptr) violate(kStreamNotCaptured, "task groups are captured", "the stream is not captured");
  if (stream->capture->open_group != nullptr) violate(kTaskGroupStatus, "one task group at a time", "one is open");
  stream->capture->open_group = std::make_shared<TaskGroup>();
  stream->capture->open_group->graph = stream->capture;
  stream->capture->open_group->first = stream->capture->tasks.size();
}

void* end_group(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(queues().mutex);
  const std::shared_ptr<Graph> graph = stream->capture;
  if (graph == nullptr || graph->open_group == nullptr) {
    violate(kTaskGroupStatus, "a task group ends after it began", "none is open");
  }
  const std::shared_ptr<TaskGroup> group = std::exchange(graph->open_group, nullptr);
  group->count = graph->tasks.size() - group->first;
  return queues().groups.add(group);
}

void begin_update(const std::shared_ptr<Stream>& stream, void* handle) {
  const std::lock_guard lock(queues().mutex);
  const std::shared_ptr<TaskGroup> group = queues().groups.find(handle);
  if (group == nullptr) violate(kBadHandle, "handles are alive", text("task group %p is none", handle));
  group->replacement.clear();
  stream->update = group;
}

void end_update(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(queues().mutex);
  const std::shared_ptr<TaskGroup> group = std::exchange(stream->update, nullptr);
  if (group == nullptr) violate(kTaskGroupStatus, "an update ends after it began", "none is open");
  if (group->replacement.size() != group->count) {
    violate(kTaskGroupStatus, "an update has as many tasks as its group",
            text("%zu instead of %zu", group->replacement.size(), group->count));
  }
  std::move(group->replacement.begin(), group->replacement.end(),
            group->graph->tasks.begin() + static_cast<std::ptrdiff_t>(group->first));
}

void forbid_while_capturing(const char* what) {
  const std::lock_guard lock(queues().mutex);
  const std::shared_ptr<Graph>& graph = queues().capturing;
  if (graph == nullptr || graph->mode == kCaptureRelaxed || thread_mode == kCaptureRelaxed) return;
  const bool is_here = graph->thread == ::syscall(SYS_gettid);
  if (!is_here && (graph->mode == kCaptureThreadLocal || thread_mode == kCaptureThreadLocal)) return;
  graph->is_broken = true;
  violate(kCaptureForbids, "no synchronous calls while capturing", what);
}

int exchange_capture_mode(int mode) { return std::exchange(thread_mode, mode); }

}  // namespace ascendcl
