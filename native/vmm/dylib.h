// A vendor's shared library, opened at run time: one wheel serves every device, and none of them is a build requirement.
// Knows no vendor. A library is never closed: its threads and exit handlers may run until the process ends.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace xllm::vmm {

class Library {
 public:
  // The first of `paths` that can be loaded; a plain name is looked up as the dynamic loader does.
  // Throws std::runtime_error with what the loader said of each.
  explicit Library(const std::vector<std::string>& paths) {
    std::string reasons;
    for (const std::string& path : paths) {
      handle_ = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (handle_ != nullptr) return;
      const char* const reason = ::dlerror();
      reasons += (reasons.empty() ? "" : "; ") + std::string(reason != nullptr ? reason : path);
    }
    throw std::runtime_error(reasons.empty() ? "no library to load" : reasons);
  }

  // Sets `function` to the symbol, nullptr where the library (an older one) has none.
  template <typename Function>
  void find(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(::dlsym(handle_, name));  // NOLINT: that is what dlsym is for
  }

  // The same, but the symbol has to be there: std::runtime_error names it.
  template <typename Function>
  void require(const char* name, Function*& function) const {
    find(name, function);
    if (function == nullptr) throw std::runtime_error(std::string("the library has no function ") + name);
  }

 private:
  void* handle_ = nullptr;
};

}  // namespace xllm::vmm
