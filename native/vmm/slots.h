// Which slots of the sparse file are free. A slot is one page; only its offset in the file matters: pages whose slots
// and addresses are both adjacent share one kernel mapping, so slots are given out in runs as long as possible.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace xllm::vmm {

class Slots {
 public:
  explicit Slots(std::uint32_t count) : free_{{0, count}} {}

  // `count` slots in rising order: the lowest free run that holds them all, else the lowest free slots. Empty if short.
  std::vector<std::uint32_t> take(std::size_t count);
  void give(std::uint32_t slot);

 private:
  void take_run(std::map<std::uint32_t, std::uint32_t>::iterator run, std::uint32_t count,
                std::vector<std::uint32_t>& taken);

  std::map<std::uint32_t, std::uint32_t> free_;  // first slot → length; runs never touch
};

}  // namespace xllm::vmm
