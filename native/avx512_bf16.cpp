#define CLEARHEAD_ISA avx512_bf16
#include "vec_avx512.h"
// the algorithm follows its vector verbs
#include "attention.inl"

namespace clearhead {
extern const Kernel avx512_bf16_kernel;
const Kernel avx512_bf16_kernel = {"avx512_bf16", true, avx512_bf16::kMaxLanes, avx512_bf16::forward_scratch, avx512_bf16::forward_item, avx512_bf16::pack_values, avx512_bf16::exp2_array};
}  // namespace clearhead
