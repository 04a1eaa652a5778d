#include "acl_api.h"

#include <algorithm>
#include <cstdlib>

namespace xllm::vmm {
namespace {

constexpr std::size_t kDefaultPage = std::size_t{2} << 20;
constexpr std::size_t kLongestText = 400;

std::vector<std::string> library_paths(const std::string& library) {
  if (!library.empty()) return {library};
  std::vector<std::string> paths{"libascendcl.so"};
  for (const char* const variable : {"ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"}) {
    const char* const folder = std::getenv(variable);
    if (folder != nullptr && *folder != '\0') paths.push_back(std::string(folder) + "/lib64/libascendcl.so");
  }
  return paths;
}

const char* meaning(int code) {
  switch (code) {
    case 100000: return "an argument is not valid";
    case 100001: return "the runtime is not initialized";
    case 100039: return "this library is the toolkit's stub for compiling, not the runtime";
    case 107000: return "the driver refused a value";
    case 107001: return "there is no such device";
    case 107002: return "the thread has no current device";
    case 107017: return "the handle is not valid";
    case kAclUnsupported: return "not supported by this driver";
    case kAclOutOfMemory: return "out of memory";
    case kAclDeviceOutOfMemory: return "the device is out of memory";
    case 507899: return "the driver failed: busy, or an address that is not as expected";
    default: return "";
  }
}

}  // namespace

void raise_acl(Verb verb, int code, Address address, const std::string& text) {
  // Most misuse and most failures come as 107000 or 507899; only these two say that freeing memory would help.
  if (code == kAclOutOfMemory || code == kAclDeviceOutOfMemory) throw Shortage(verb, code, address, text);
  throw Error(verb, code, address, text);
}

AclApi::AclApi(const std::string& library) : library_(library_paths(library)) {
  library_.require("aclInit", init_);
  library_.require("aclrtGetDeviceCount", get_device_count);
  library_.require("aclrtGetDevice", get_device);
  library_.require("aclrtSetDevice", set_device_);
  library_.require("aclrtGetMemInfo", get_memory);
  library_.require("aclrtReserveMemAddress", reserve);
  library_.require("aclrtReleaseMemAddress", release);
  library_.require("aclrtMallocPhysical", create);
  library_.require("aclrtFreePhysical", destroy);
  library_.require("aclrtMapMem", map);
  library_.require("aclrtUnmapMem", unmap);
  library_.find("aclrtMemGetAllocationGranularity", get_granularity_);
  library_.find("aclGetRecentErrMsg", recent_error_);
}

void AclApi::start() const {
  const int code = init_(nullptr);
  if (code != kAclRepeatInitialize) check(Verb::kInfo, "aclInit", code);
}

void AclApi::set_device(int device) const { check(Verb::kInfo, "aclrtSetDevice", set_device_(device)); }

std::size_t AclApi::granularity(const AclPageKind& kind) const {
  std::size_t nbytes = kDefaultPage;
  if (get_granularity_ != nullptr) {
    check(Verb::kInfo, "aclrtMemGetAllocationGranularity", get_granularity_(&kind, kAclMinimum, &nbytes));
  }
  return nbytes;
}

std::string AclApi::explain(const char* function, int code) const {
  const char* const recent = recent_error_ != nullptr ? recent_error_() : nullptr;
  std::string text = recent != nullptr && *recent != '\0' ? recent : meaning(code);
  text.resize(std::min(text.size(), kLongestText));
  std::replace(text.begin(), text.end(), '\n', ' ');  // one line in the log
  return text.empty() ? function : std::string(function) + ": " + text;
}

void AclApi::check(Verb verb, const char* function, int code, Address address) const {
  if (code != 0) raise_acl(verb, code, address, explain(function, code));
}

AclThread::AclThread(const AclApi& api, int device) : api_(api), device_(device) {
  if (api_.get_device(&before_) != 0) before_ = -1;  // the thread has no device
  if (before_ != device_) api_.set_device(device_);
}

AclThread::~AclThread() {
  if (before_ < 0 || before_ == device_) return;
  try {
    api_.set_device(before_);
  } catch (const Error&) {
    // The device that was current cannot be made current again: whoever uses it next is told by its own call.
  }
}

}  // namespace xllm::vmm
