// Ascend device memory through libascendcl.so: a handle is one physical allocation of one page, a mapping is one vendor
// map of one whole handle, and every mapping is taken away by one unmap of its start.
//
//   range   [ page 0 | nothing | page 2 | page 3 | nothing ]     aclrtReserveMemAddress, at most 128 GiB
//               |                  |        |
//   handles     7                  9        8                    aclrtMallocPhysical, 2 MiB each
//
// The vendor's unmap waits for nobody: see the REQUIRES of driver.h about device work.
//
// CALLS. create, destroy, map and unmap cost one vendor call per page and nothing else (the cost is per handle, not per
//   byte); only info and create bind the calling thread to the device. Nothing is finalized or reset, ever.
//
// LEFTOVERS. When undoing a failed batch fails too, what could not be undone is out of the books but still there. It is
//   kept in `leftover_` and tried again by every later verb that would meet it, and by close.
#pragma once

#include <mutex>
#include <optional>
#include <unordered_map>

#include "acl_api.h"
#include "address_map.h"
#include "driver.h"

namespace xllm::vmm {

struct AclOptions {
  std::string library;                    // path of libascendcl.so; empty: the usual places
  int device = 0;                         // as the vendor numbers them, after ASCEND_RT_VISIBLE_DEVICES
  std::optional<std::size_t> page_bytes;  // multiple of what the vendor gives (2 MiB); none: that
  std::uint64_t total_bytes = 0;          // cap on this driver's pages and on info().total; 0: none
};

class AclDriver : public Driver {
 public:
  // Throws std::runtime_error without the library, Error(info) if the device fails, std::invalid_argument for a page
  // size that cannot be.
  explicit AclDriver(const AclOptions& options);
  ~AclDriver() override;

  Info info() const override;
  Address reserve(std::size_t nbytes) override;
  void release(Address address, std::size_t nbytes) override;
  std::vector<Handle> create(std::size_t count) override;
  std::vector<Handle> destroy(std::vector<Handle> handles) override;
  void map(std::vector<Page> pages) override;
  std::vector<Address> unmap(std::vector<Address> addresses) override;
  Export export_handle(Handle handle) override;       // always Error: a vendor handle is shared with no descriptor
  std::uint64_t memfd_bytes() const override;         // handles created and not destroyed, by our own count
  std::map<std::string, std::uint64_t> usage() const override;
  void close() override;

 private:
  struct Memory {
    std::uint64_t total, free;
  };

  Memory memory() const;
  void check_open(Verb verb) const;
  void charge(std::size_t count);
  void make(std::size_t count, std::vector<AclHandle>& made) const;
  void put(const std::vector<Page>& pages);
  bool take(Verb verb, Address address);  // whether the vendor unmapped it
  bool give(AclHandle handle);            // whether the vendor freed it
  void settle_leftover();

  const AclOptions options_;
  const AclApi api_;
  const AclPageKind kind_;
  const std::size_t page_bytes_;
  std::atomic<std::uint64_t> owned_{0};  // bytes of handles, and of those being created
  const std::uint64_t total_;

  mutable std::mutex mutex_;  // guards everything below; never held while a page is created
  bool closed_ = false;
  Handle next_handle_ = 1;
  std::unordered_map<Handle, AclHandle> handles_;
  AddressMap addresses_;
  struct {
    std::map<Address, Handle> mapped;  // pages whose undo failed
    std::vector<AclHandle> handles;    // handles whose undo failed
  } leftover_;
};

struct AclProbe {
  std::uint32_t num_devices;
  std::string reason;  // why there are none
};

// What the runtime sees. `library` as in AclOptions. Opens no device.
AclProbe probe_acl(const std::string& library);

}  // namespace xllm::vmm
