// The life of streams and events.
#include "call.h"
#include "device.h"
#include "queue_state.h"

namespace ascendcl {
namespace {

template <class Object>
std::shared_ptr<Object> find(const Registry<Object>& registry, void* handle, const char* what) {
  const std::lock_guard lock(queues().mutex);
  std::shared_ptr<Object> object = registry.find(handle);
  if (object == nullptr) {
    const char* state = registry.was_given(handle) ? "was destroyed" : "is none";
    violate(kBadHandle, "handles are alive", text("%s %p %s", what, handle, state));
  }
  return object;
}

}  // namespace

void* create_stream(int device, bool is_default) {
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  stream->is_default = is_default;
  const std::lock_guard lock(queues().mutex);
  return queues().streams.add(std::move(stream));
}

void destroy_stream(void* handle, bool force) {
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!force) synchronize(stream, -1);
  const std::lock_guard lock(queues().mutex);
  queues().streams.remove(handle);
}

std::shared_ptr<Stream> find_stream(void* stream) {
  return find(queues().streams, stream != nullptr ? stream : current_context()->default_stream, "stream");
}

void* create_event() {
  const std::lock_guard lock(queues().mutex);
  return queues().events.add(std::make_shared<Event>());
}

void destroy_event(void* event) {
  find_event(event);
  const std::lock_guard lock(queues().mutex);
  queues().events.remove(event);
}

std::shared_ptr<Event> find_event(void* event) { return find(queues().events, event, "event"); }

}  // namespace ascendcl
