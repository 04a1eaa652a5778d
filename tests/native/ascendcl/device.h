// Devices, contexts and which thread uses which. Knows no memory and no queues.
#pragma once

#include <memory>

namespace ascendcl {

struct Context {
  int device;                    // as the program numbers the visible devices
  void* default_stream = nullptr;
};

int physical_device(int device);                    // its number in the ledger; or a violation
std::shared_ptr<Context> current_context();         // of this thread; or a violation
void require_initialised();                         // aclInit ran; or a violation
void require_opened();                              // any thread of the process ran aclrtSetDevice; or a violation

}  // namespace ascendcl
