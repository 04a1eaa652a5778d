// What an emulated machine is like, read once from the environment. Knows no calls.
//
//   XLLM_ACL_EMULATOR_MODE        hardware (default): a broken rule is the vendor's code; strict: an abort in words
//   XLLM_ACL_EMULATOR_HBM_BYTES   memory of each device, default 8 GiB; host memory is used only where touched
//   XLLM_ACL_EMULATOR_DEVICES     number of devices, default 1; ASCEND_RT_VISIBLE_DEVICES chooses among them
//   XLLM_ACL_EMULATOR_SOC         the name aclrtGetSocName says, default Ascend910B3
//   XLLM_ACL_EMULATOR_DRIVER      major version of the device driver, default 26; 25 refuses the calls that need 26
//   XLLM_ACL_EMULATOR_STREAMS     immediate (default): queued work runs when queued; lazy: when somebody waits for it
//   XLLM_ACL_EMULATOR_POISON      0 ... 255: the byte fresh device memory is filled with; unset: zeros
//   XLLM_ACL_EMULATOR_SCRIPT      faults, delays and neighbours (script.h), separated by ';'
//   XLLM_ACL_EMULATOR_TRACE       1: keep the ordered list of calls for the report
//   XLLM_ACL_EMULATOR_REPORT      where the report (report.h) is written at exit: a path (%p is the process id) or
//                                 "stderr"; unset: only in strict mode, only if something was left, to stderr
//   XLLM_ACL_EMULATOR_LEDGER      a file through which all processes share the devices' memory (ledger.h)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ascendcl {

struct Settings {
  bool strict;
  std::uint64_t hbm_bytes;
  std::vector<int> devices;  // physical number of each visible device
  std::string soc;
  int driver;
  bool lazy;
  int poison;  // -1: none
  std::string script;
  bool trace;
  std::string report;
  std::string ledger;
};

// The process's settings. A value that cannot be read ends the process with one sentence.
const Settings& settings();

// The same, to change: for tests that turn a knob while the process runs.
Settings& mutable_settings();

}  // namespace ascendcl
