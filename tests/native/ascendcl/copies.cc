// Copies and fills: every byte on the device must be mapped, and stays so while the copy runs.
#include <unistd.h>

#include <cstring>

#include "call.h"
#include "device.h"
#include "host_memory.h"
#include "memory_map.h"
#include "queue.h"
#include "script.h"
#include "vmm.h"

namespace ascendcl {
namespace {

std::vector<Span> device_spans(const void* first, const void* second, std::size_t nbytes) {
  std::vector<Span> spans;
  for (const void* address : {first, second}) {
    const bool on_device = address != nullptr && VirtualSpace::contains(address_of(address));
    if (on_device) spans.push_back({address_of(address), nbytes});
  }
  return spans;
}

// Driver rule 9: EINVAL, no crash.
void check_mapped(const std::vector<Span>& spans) {
  for (const Span& span : spans) {
    const std::string missing = memory_map().missing(span);
    if (!missing.empty()) violate(kDriverError, "copies want every byte mapped", missing);
  }
}

// Runs `work` with the spans' pages held.
void with_pages_held(const std::vector<Span>& spans, const std::function<void()>& work) {
  {
    const auto lock = memory_map().lock();
    check_mapped(spans);
    memory_map().change_readers(spans, 1);
  }
  work();
  if (const std::uint64_t delay = scripted_delay("copy"); delay != 0) ::usleep(static_cast<useconds_t>(delay));
  const auto lock = memory_map().lock();
  memory_map().change_readers(spans, -1);
}

void check_copy(const void* to, std::size_t room, const void* from, std::size_t nbytes) {
  check_given(to, "the destination");
  check_given(from, "the source");
  if (nbytes > room) violate(kBadArgument, "the destination has room", text("%zu into %zu bytes", nbytes, room));
}

void queue_copy(const char* name, void* to, const void* from, std::size_t nbytes, void* stream_handle) {
  const std::shared_ptr<Stream> stream = find_stream(stream_handle);
  current_context();
  const std::vector<Span> spans = device_spans(to, from, nbytes);
  if (spans.empty()) fail(kNotSupported, "a queued copy from host to host");
  {
    const auto lock = memory_map().lock();
    check_mapped(spans);
  }
  enqueue(stream, {name, spans, [to, from, nbytes] { std::memmove(to, from, nbytes); }});
  const bool to_device = VirtualSpace::contains(address_of(to)), from_device = VirtualSpace::contains(address_of(from));
  const bool is_pageable = (!to_device && !is_pinned(to, nbytes)) || (!from_device && !is_pinned(from, nbytes));
  if (!is_pageable) return;
  if (stream->capture != nullptr) {
    violate(kCaptureForbids, "no synchronous calls while capturing", "a copy of pageable host memory");
  }
  synchronize(stream, -1);
}

void check_fill(const char* name, void* to, std::size_t room, std::size_t nbytes) {
  check_given(to, "the destination");
  if (nbytes > room) violate(kBadArgument, "the destination has room", text("%s: %zu into %zu", name, nbytes, room));
}

}  // namespace
}  // namespace ascendcl

using namespace ascendcl;  // NOLINT: the exported names follow

ASCENDCL_API int aclrtMemcpy(void* to, std::size_t room, const void* from, std::size_t nbytes, int kind) {
  return call("aclrtMemcpy", {to, room, from, nbytes, kind}, [&] {
    check_copy(to, room, from, nbytes);
    current_context();
    forbid_while_capturing("aclrtMemcpy");
    with_pages_held(device_spans(to, from, nbytes), [&] { std::memmove(to, from, nbytes); });
  });
}

ASCENDCL_API int aclrtMemcpyAsync(void* to, std::size_t room, const void* from, std::size_t nbytes, int kind,
                                  void* stream) {
  return call("aclrtMemcpyAsync", {to, room, from, nbytes, kind, stream}, [&] {
    check_copy(to, room, from, nbytes);
    queue_copy("aclrtMemcpyAsync", to, from, nbytes, stream);
  });
}

ASCENDCL_API int aclrtMemcpyAsyncWithCondition(void* to, std::size_t room, const void* from, std::size_t nbytes,
                                               int kind, void* stream) {
  return call("aclrtMemcpyAsyncWithCondition", {to, room, from, nbytes, kind, stream}, [&] {
    check_copy(to, room, from, nbytes);
    queue_copy("aclrtMemcpyAsyncWithCondition", to, from, nbytes, stream);
  });
}

ASCENDCL_API int aclrtMemset(void* to, std::size_t room, std::int32_t value, std::size_t nbytes) {
  return call("aclrtMemset", {to, room, value, nbytes}, [&] {
    check_fill("aclrtMemset", to, room, nbytes);
    current_context();
    forbid_while_capturing("aclrtMemset");
    with_pages_held(device_spans(to, nullptr, nbytes), [&] { std::memset(to, value, nbytes); });
  });
}

ASCENDCL_API int aclrtMemsetAsync(void* to, std::size_t room, std::int32_t value, std::size_t nbytes, void* stream) {
  return call("aclrtMemsetAsync", {to, room, value, nbytes, stream}, [&] {
    check_fill("aclrtMemsetAsync", to, room, nbytes);
    const std::shared_ptr<Stream> queue = find_stream(stream);
    const std::vector<Span> spans = device_spans(to, nullptr, nbytes);
    {
      const auto lock = memory_map().lock();
      check_mapped(spans);
    }
    enqueue(queue, {"aclrtMemsetAsync", spans, [=] { std::memset(to, value, nbytes); }});
  });
}
