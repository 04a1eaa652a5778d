// Descriptions of tensors and operator attributes: kept so that they can be read back; no operator ever sees them.
#include <map>
#include <mutex>
#include <vector>

#include "call.h"

namespace {

struct TensorDescription {
  int type;
  int format;
  std::vector<std::int64_t> dims;
};

struct DataBuffer {
  void* data;
  std::size_t nbytes;
};

struct Attributes {};  // their values would only be read by operators

std::vector<std::int64_t> list(int count, const std::int64_t* dims) { return {dims, dims + count}; }

}  // namespace

using namespace ascendcl;  // NOLINT: the exported names follow

ASCENDCL_API TensorDescription* aclCreateTensorDesc(int type, int count, const std::int64_t* dims, int format) {
  return new TensorDescription{type, format, list(count, dims)};
}

ASCENDCL_API void aclDestroyTensorDesc(const TensorDescription* description) { delete description; }

ASCENDCL_API int aclGetTensorDescType(const TensorDescription* description) { return description->type; }

ASCENDCL_API int aclGetTensorDescFormat(const TensorDescription* description) { return description->format; }

ASCENDCL_API std::size_t aclGetTensorDescNumDims(const TensorDescription* description) {
  return description->dims.size();
}

ASCENDCL_API int aclGetTensorDescDimV2(const TensorDescription* description, std::size_t index, std::int64_t* dim) {
  if (index >= description->dims.size()) return kBadArgument;
  *dim = description->dims[index];
  return kSuccess;
}

ASCENDCL_API void aclSetTensorDescName(TensorDescription*, const char*) {}

ASCENDCL_API int aclSetTensorFormat(TensorDescription* description, int format) {
  description->format = format;
  return kSuccess;
}

ASCENDCL_API int aclSetTensorShape(TensorDescription* description, int count, const std::int64_t* dims) {
  description->dims = list(count, dims);
  return kSuccess;
}

ASCENDCL_API int aclSetTensorPlaceMent(TensorDescription*, int) { return kSuccess; }

ASCENDCL_API DataBuffer* aclCreateDataBuffer(void* data, std::size_t nbytes) { return new DataBuffer{data, nbytes}; }

ASCENDCL_API int aclDestroyDataBuffer(const DataBuffer* buffer) {
  delete buffer;
  return kSuccess;
}

ASCENDCL_API Attributes* aclopCreateAttr() { return new Attributes; }

ASCENDCL_API void aclopDestroyAttr(const Attributes* attributes) { delete attributes; }

ASCENDCL_API int aclopSetAttrBool(Attributes*, const char*, std::uint8_t) { return kSuccess; }
ASCENDCL_API int aclopSetAttrInt(Attributes*, const char*, std::int64_t) { return kSuccess; }
ASCENDCL_API int aclopSetAttrFloat(Attributes*, const char*, float) { return kSuccess; }
ASCENDCL_API int aclopSetAttrString(Attributes*, const char*, const char*) { return kSuccess; }
ASCENDCL_API int aclopSetAttrDataType(Attributes*, const char*, int) { return kSuccess; }
ASCENDCL_API int aclopSetAttrListBool(Attributes*, const char*, int, const std::uint8_t*) { return kSuccess; }
ASCENDCL_API int aclopSetAttrListInt(Attributes*, const char*, int, const std::int64_t*) { return kSuccess; }
ASCENDCL_API int aclopSetAttrListFloat(Attributes*, const char*, int, const float*) { return kSuccess; }
ASCENDCL_API int aclopSetAttrListListInt(Attributes*, const char*, int, const int*, const std::int64_t* const*) {
  return kSuccess;
}
