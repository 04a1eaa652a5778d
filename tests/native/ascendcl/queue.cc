#include "queue.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <map>
#include <thread>

#include "call.h"
#include "device.h"
#include "queue_state.h"
#include "script.h"
#include "settings.h"

namespace ascendcl {
namespace {

constexpr std::size_t kLongestQueue = 4096;
constexpr Clock::time_point kForever = Clock::time_point::max();

void raise_fault(int device) {
  if (const auto found = queues().faults.find(device); found != queues().faults.end()) {
    fail(kDeviceFault, found->second);
  }
}

// Driver rule 10: work that meets an unmapped page is an asynchronous fault, and the device is lost to the process.
void check_spans(const Task& task, int device) {
  const auto lock = memory_map().lock();
  for (const Span& span : task.spans) {
    const std::string missing = memory_map().missing(span);
    if (missing.empty()) continue;
    note_violation(task.name, "queued work finds its pages mapped", missing);
    queues().faults[device] = task.name + ": MTE DDR address out of range: " + missing;
    return;
  }
  memory_map().change_readers(task.spans, 1);
}

// The front of the queue, already marked as running by this thread. `lock` is dropped while it works.
void run_front(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Stream>& stream) {
  const std::shared_ptr<Task> task = stream->pending.front();
  const auto is_lost = [&] { return queues().faults.count(stream->device) != 0; };
  if (!is_lost()) check_spans(*task, stream->device);
  if (!is_lost()) {
    lock.unlock();
    if (task->work) task->work();
    if (!task->spans.empty()) {
      std::this_thread::sleep_for(std::chrono::microseconds(scripted_delay("copy")));
      const auto memory_lock = memory_map().lock();
      memory_map().change_readers(task->spans, -1);
    }
    lock.lock();
  }
  stream->pending.pop_front();
  ++stream->done;
  stream->runner = 0;
  queues().changed.notify_all();
}

bool run_until(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Stream>& stream, std::uint64_t ticket,
               Clock::time_point deadline);

// Whether the front may run now; waits for it (its event, its delay) until the deadline.
bool make_ready(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Stream>& stream, Clock::time_point deadline) {
  const std::shared_ptr<Task> task = stream->pending.front();
  if (task->after != nullptr && !run_until(lock, task->after, task->ticket, deadline)) return false;
  if (task->due <= Clock::now()) return true;
  if (task->due > deadline) return false;
  lock.unlock();
  std::this_thread::sleep_until(task->due);
  lock.lock();
  return true;
}

// Runs the stream's work up to the ticket; false if the deadline came first.
bool run_until(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Stream>& stream, std::uint64_t ticket,
               Clock::time_point deadline) {
  const long self = ::syscall(SYS_gettid);
  while (stream->done < ticket) {
    if (stream->runner == self) return true;  // work that waits for its own stream: it is in order already
    if (stream->runner != 0) {
      if (deadline == kForever) {
        queues().changed.wait(lock);
      } else if (queues().changed.wait_until(lock, deadline) == std::cv_status::timeout) {
        return stream->done >= ticket;
      }
      continue;
    }
    const std::uint64_t before = stream->done;
    if (!make_ready(lock, stream, deadline)) return false;
    if (stream->runner != 0 || stream->done != before) continue;  // another thread was quicker
    stream->runner = self;
    run_front(lock, stream);
  }
  return true;
}

Clock::time_point deadline_of(int milliseconds) {
  return milliseconds < 0 ? kForever : Clock::now() + std::chrono::milliseconds(milliseconds);
}

void enqueue_locked(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Stream>& stream, Task task) {
  if (stream->update != nullptr) {
    stream->update->replacement.push_back(std::move(task));
    return;
  }
  if (stream->capture != nullptr) {
    stream->capture->tasks.push_back(std::move(task));
    return;
  }
  const std::uint64_t delay = scripted_delay("task");
  task.due = Clock::now() + std::chrono::microseconds(delay);
  stream->pending.push_back(std::make_shared<Task>(std::move(task)));
  ++stream->queued;
  if (!settings().lazy && delay == 0) run_until(lock, stream, stream->queued, kForever);
  if (stream->pending.size() > kLongestQueue) run_until(lock, stream, stream->done + 1, kForever);
}

}  // namespace

Queues& queues() {
  static Queues& kept = *new Queues;  // never destroyed: calls may come during exit
  return kept;
}

void enqueue(const std::shared_ptr<Stream>& stream, Task task) {
  std::unique_lock lock(queues().mutex);
  enqueue_locked(lock, stream, std::move(task));
}

void record_event(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream) {
  std::unique_lock lock(queues().mutex);
  event->stream = stream;
  event->ticket = stream->queued + 1;
  event->capture = stream->capture;
  enqueue_locked(lock, stream, {"record", {}, [event] { event->time = Clock::now(); }});
}

void wait_event(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Event>& event) {
  std::unique_lock lock(queues().mutex);
  if (event->capture != nullptr && event->capture == queues().capturing) {
    // A second stream joins the capture; inside it the order is that of the calls.
    if (stream->capture == nullptr) event->capture->streams.push_back(stream);
    stream->capture = event->capture;
  } else if (event->stream != nullptr && event->capture == nullptr) {
    enqueue_locked(lock, stream, {"wait", {}, nullptr, event->stream, event->ticket});
  }  // else never recorded, or inside a graph that is complete: nothing to wait for
}

void synchronize(const std::shared_ptr<Stream>& stream, int milliseconds) {
  std::unique_lock lock(queues().mutex);
  if (stream->capture != nullptr) {
    stream->capture->is_broken = true;
    violate(kCaptureForbids, "no synchronise while capturing", "the stream is being captured");
  }
  if (!run_until(lock, stream, stream->queued, deadline_of(milliseconds))) {
    fail(kTimeout, text("the stream did not finish in %d ms", milliseconds));
  }
  raise_fault(stream->device);
}

void synchronize_device(int device, int milliseconds) {
  std::unique_lock lock(queues().mutex);
  const Clock::time_point deadline = deadline_of(milliseconds);
  std::vector<std::shared_ptr<Stream>> streams;
  for (const auto& [handle, stream] : queues().streams.all()) {
    if (stream->device == device) streams.push_back(stream);
  }
  for (const auto& stream : streams) {
    if (!run_until(lock, stream, stream->queued, deadline)) {
      fail(kTimeout, text("device %d did not finish in %d ms", device, milliseconds));
    }
  }
  raise_fault(device);
}

void synchronize_event(const std::shared_ptr<Event>& event) {
  std::unique_lock lock(queues().mutex);
  if (event->stream == nullptr) return;
  const std::shared_ptr<Stream> stream = event->stream;
  run_until(lock, stream, event->ticket, kForever);
  raise_fault(stream->device);
}

bool is_idle(const std::shared_ptr<Stream>& stream) {
  std::unique_lock lock(queues().mutex);
  const bool idle = run_until(lock, stream, stream->queued, Clock::now());
  raise_fault(stream->device);
  return idle;
}

bool has_run(const std::shared_ptr<Event>& event) {
  std::unique_lock lock(queues().mutex);
  if (event->stream == nullptr) return false;
  return run_until(lock, event->stream, event->ticket, Clock::now());
}

std::string pending_work_at(std::uint64_t address) {
  std::unique_lock lock(queues().mutex);
  std::vector<std::shared_ptr<Stream>> streams;
  for (const auto& [handle, stream] : queues().streams.all()) streams.push_back(stream);
  if (!settings().lazy) {  // work whose time has come has run on a device that does not wait to be asked
    for (const auto& stream : streams) run_until(lock, stream, stream->queued, Clock::now());
  }
  const auto memory_lock = memory_map().lock();
  const auto* extent = memory_map().find(address);
  if (extent == nullptr) return "";
  const std::uint64_t end = extent->first + extent->second.nbytes;
  for (const auto& stream : streams) {
    for (const auto& task : stream->pending) {
      for (const Span& span : task->spans) {
        if (span.address < end && span.address + span.nbytes > extent->first) return task->name + " is still queued";
      }
    }
  }
  return "";
}

QueueCounts queue_counts() {
  const std::lock_guard lock(queues().mutex);
  QueueCounts counts{queues().streams.all().size(), queues().events.all().size(), queues().graphs.all().size(), 0};
  for (const auto& [handle, stream] : queues().streams.all()) counts.pending += stream->pending.size();
  return counts;
}

void forget_faults() {
  const std::lock_guard lock(queues().mutex);
  queues().faults.clear();
}

}  // namespace ascendcl
