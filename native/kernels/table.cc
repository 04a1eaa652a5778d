// The kernels of one instruction level, gathered.
#include "simd.h"

#define XLLM_STRING(x) #x
#define XLLM_NAME(x) XLLM_STRING(x)

namespace xllm::XLLM_LEVEL {

void linear(const LinearArgs&);
void norm(const NormArgs&);
void head_norm(const HeadNormArgs&);
void rope(const RopeArgs&);
void gated_mul(const GatedMulArgs&);
void write_kv(const WriteKvArgs&);
void attention(const AttentionArgs&);
int64_t attention_scratch(const AttentionArgs&);
void embedding(const EmbeddingArgs&);

extern const KernelTable table = {XLLM_NAME(XLLM_LEVEL), linear,   norm,      head_norm,         rope,
                                  gated_mul,             write_kv, attention, attention_scratch, embedding};

}  // namespace xllm::XLLM_LEVEL
