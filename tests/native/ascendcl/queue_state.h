// What queue.cc, handles.cc and capture.cc share. For them alone.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "queue.h"
#include "registry.h"

namespace ascendcl {

struct Queues {
  std::mutex mutex;
  std::condition_variable changed;  // a task has run
  Registry<Stream> streams{2};
  Registry<Event> events{3};
  Registry<Graph> graphs{4};
  Registry<TaskGroup> groups{6};
  std::map<int, std::string> faults;  // device → what was lost
  std::shared_ptr<Graph> capturing;   // at most one at a time
  std::uint32_t next_graph = 1;
};

Queues& queues();

}  // namespace ascendcl
