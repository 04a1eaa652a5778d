// Streams, events and graphs: ordered queues of work. Knows memory only as spans that the work touches.
//
// No thread of its own: queued work runs in the thread that waits for it or asks about it, in order, no earlier than
// its delay ("delay task"), and at once when it is queued unless settings.lazy. What nobody waited for is *pending*;
// a page that is unmapped meanwhile is found out, and work that meets such a page is a device fault (507015), which
// every later wait on that device returns: the context is lost.
//
// THREADS. One mutex of its own; work runs without it. Lock order: this mutex, then memory_map's.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "memory_map.h"

namespace ascendcl {

using Clock = std::chrono::steady_clock;

struct Stream;
struct Event;
struct Graph;
struct TaskGroup;

struct Task {
  std::string name;
  std::vector<Span> spans = {};            // device memory it touches
  std::function<void()> work = nullptr;
  std::shared_ptr<Stream> after = nullptr;  // runs when that stream has come to the ticket
  std::uint64_t ticket = 0;
  Clock::time_point due{};
};

struct Stream {
  int device;
  std::deque<std::shared_ptr<Task>> pending;
  std::uint64_t queued = 0, done = 0;  // tickets
  bool is_default = false;
  long runner = 0;                     // the thread that runs its front now
  std::shared_ptr<Graph> capture;      // work is recorded there instead
  std::shared_ptr<TaskGroup> update;   // or there
};

struct Event {
  std::shared_ptr<Stream> stream;  // of the last record
  std::uint64_t ticket = 0;
  Clock::time_point time{};
  std::shared_ptr<Graph> capture;  // recorded while capturing
};

struct Graph {
  std::vector<Task> tasks;
  std::vector<std::shared_ptr<Stream>> streams;  // that joined, the origin first
  int mode;
  long thread;
  bool is_broken = false;
  std::uint32_t id = 0;
  void* handle = nullptr;
  std::shared_ptr<TaskGroup> open_group;
};

// A run of a graph's tasks that the program replaces between replays, by as many others.
struct TaskGroup {
  std::shared_ptr<Graph> graph;
  std::size_t first = 0, count = 0;
  std::vector<Task> replacement;
};

void* create_stream(int device, bool is_default = false);
void destroy_stream(void* stream, bool force);
std::shared_ptr<Stream> find_stream(void* stream);  // null: this thread's default stream

void* create_event();
void destroy_event(void* event);
std::shared_ptr<Event> find_event(void* event);

// Queues (or, while capturing, records). Throws what the task throws if it runs at once.
void enqueue(const std::shared_ptr<Stream>& stream, Task task);
void record_event(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream);
void wait_event(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Event>& event);

// Runs everything queued so far, or fails: kTimeout after `milliseconds` (negative: never), kDeviceFault.
void synchronize(const std::shared_ptr<Stream>& stream, int milliseconds);
void synchronize_device(int device, int milliseconds);
void synchronize_event(const std::shared_ptr<Event>& event);
bool is_idle(const std::shared_ptr<Stream>& stream);   // after running what is due
bool has_run(const std::shared_ptr<Event>& event);     // after running what is due

// What queued work touches the map that starts at the address; "" if none.
std::string pending_work_at(std::uint64_t address);

void begin_capture(const std::shared_ptr<Stream>& stream, int mode);
void* end_capture(const std::shared_ptr<Stream>& stream);
std::shared_ptr<Graph> find_graph(void* graph);
void destroy_graph(void* graph);
void replay(const std::shared_ptr<Graph>& graph, const std::shared_ptr<Stream>& stream);
void begin_group(const std::shared_ptr<Stream>& stream);
void* end_group(const std::shared_ptr<Stream>& stream);
void begin_update(const std::shared_ptr<Stream>& stream, void* group);
void end_update(const std::shared_ptr<Stream>& stream);
void forbid_while_capturing(const char* what);  // synchronous calls, while a capture of mode global is on
int exchange_capture_mode(int mode);            // this thread's

// For the report and for tests.
struct QueueCounts {
  std::uint64_t streams, events, graphs, pending;
};
QueueCounts queue_counts();
void forget_faults();

}  // namespace ascendcl
