// Opaque handles: numbers that look like pointers, are never dereferenced and never reused, so a stale one is found.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "abi.h"

namespace ascendcl {

template <class Object>
class Registry {
 public:
  // `family` sets the kinds of handle apart, so that a stream passed as an event is found too.
  explicit Registry(std::uint64_t family) : next_(0x0AC1'0000'0000'0000ULL | family << 40 | 0x10) {}

  void* add(std::shared_ptr<Object> object) {
    const std::uint64_t key = next_;
    next_ += 0x10;
    objects_[key] = std::move(object);
    return reinterpret_cast<void*>(key);
  }

  std::shared_ptr<Object> find(const void* handle) const {
    const auto found = objects_.find(address_of(handle));
    return found == objects_.end() ? nullptr : found->second;
  }

  // Whether this registry ever gave out the handle.
  bool was_given(const void* handle) const {
    const auto key = address_of(handle);
    return key < next_ && key >> 40 == next_ >> 40 && key % 0x10 == 0;
  }

  void remove(const void* handle) { objects_.erase(address_of(handle)); }

  const std::map<std::uint64_t, std::shared_ptr<Object>>& all() const { return objects_; }

 private:
  std::uint64_t next_;
  std::map<std::uint64_t, std::shared_ptr<Object>> objects_;
};

}  // namespace ascendcl
