// Names that torch_npu asks for and that the emulator has nothing behind. Switches and reports are accepted and
// forgotten; whatever would compute or launch says that it cannot, so that no result is ever garbage.
#include "call.h"

using namespace ascendcl;  // NOLINT: the exported names follow

namespace {

// Varargs swallow whatever the caller passes.
int refuse(const char* name, int code) {
  return call(name, {}, [&] { fail(code, "the emulator has no operators and no kernels"); });
}

}  // namespace

#define REFUSED(name, code) \
  ASCENDCL_API int name(...) { return refuse(#name, code); }
#define ACCEPTED(name) \
  ASCENDCL_API int name(...) { return call(#name, {}, [] {}); }

REFUSED(aclopCompileAndExecute, kNoOperator)
REFUSED(aclopCompileAndExecuteV2, kNoOperator)
REFUSED(aclrtBinaryGetFunction, kNotSupported)
REFUSED(aclrtBinaryLoadFromData, kNotSupported)
REFUSED(aclrtGetFunctionAddr, kNotSupported)
REFUSED(aclrtLaunchKernelWithHostArgs, kNotSupported)
REFUSED(rtKernelLaunch, kNotSupported)
REFUSED(rtDevBinaryRegister, kNotSupported)
REFUSED(rtFunctionRegister, kNotSupported)
REFUSED(rtGetC2cCtrlAddr, kNotSupported)
REFUSED(aclmdlRIDebugJsonPrint, kNotSupported)
REFUSED(aclrtReserveMemAddressNoUCMemory, kNotSupported)  // an A3 has it

ACCEPTED(aclopSetCompileFlag)
ACCEPTED(aclopStartDumpArgs)
ACCEPTED(aclopStopDumpArgs)
ACCEPTED(aclSetCompileopt)
ACCEPTED(aclrtSetDeviceSatMode)
ACCEPTED(aclrtSetSysParamOpt)
ACCEPTED(aclrtCtxSetSysParamOpt)
ACCEPTED(aclrtSetOpExecuteTimeOut)
ACCEPTED(aclrtSetOpExecuteTimeOutV2)
ACCEPTED(aclrtSetOpWaitTimeout)
ACCEPTED(aclrtSetStreamFailureMode)
ACCEPTED(aclrtSetStreamAttribute)
ACCEPTED(aclrtSetStreamOverflowSwitch)
ACCEPTED(aclrtProcessReport)
ACCEPTED(aclrtSubscribeReport)
ACCEPTED(aclrtUnSubscribeReport)
ACCEPTED(aclmdlInitDump)
ACCEPTED(aclmdlSetDump)
ACCEPTED(aclmdlFinalizeDump)

// AI cores, vector cores and bytes of L2, as a 910B3 has them.
ASCENDCL_API int aclGetDeviceCapability(std::uint32_t device, int what, std::int64_t* value) {
  return call("aclGetDeviceCapability", {device, what}, [&] {
    constexpr std::int64_t kValues[] = {20, 40, 192 << 20};
    if (what < 0 || what > 2) fail(kNotSupported, text("capability %d", what));
    *value = kValues[what];
  });
}

ASCENDCL_API int aclrtGetSysParamOpt(int option, std::int64_t* value) {
  return call("aclrtGetSysParamOpt", {option}, [&] { *value = 0; });
}

ASCENDCL_API int aclrtCtxGetSysParamOpt(int option, std::int64_t* value) {
  return call("aclrtCtxGetSysParamOpt", {option}, [&] { *value = 0; });
}

ASCENDCL_API int aclrtGetStreamOverflowSwitch(void* stream, std::uint32_t* flag) {
  return call("aclrtGetStreamOverflowSwitch", {stream}, [&] { *flag = 0; });
}

ASCENDCL_API std::size_t aclGetCompileoptSize(int) { return 1; }

ASCENDCL_API int aclGetCompileopt(int option, char* value, std::size_t length) {
  return call("aclGetCompileopt", {option, length}, [&] {
    if (length != 0) *value = '\0';
  });
}

ASCENDCL_API void aclAppLog(int, const char*, const char*, std::uint32_t, const char*, ...) {}

ASCENDCL_API std::int32_t MsprofRegisterCallback(std::uint32_t, void*) { return 0; }
ASCENDCL_API std::int32_t MsprofReportApi(std::uint32_t, const void*) { return 0; }
ASCENDCL_API std::int32_t MsprofReportCompactInfo(std::uint32_t, const void*, std::uint32_t) { return 0; }
ASCENDCL_API std::int32_t MsprofReportAdditionalInfo(std::uint32_t, const void*, std::uint32_t) { return 0; }
ASCENDCL_API std::uint64_t MsprofGetHashId(const char*, std::size_t) { return 0; }
ASCENDCL_API std::uint64_t MsprofSysCycleTime() { return 0; }
