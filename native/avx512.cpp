#define CLEARHEAD_ISA avx512
#include "vec_avx512.h"
// the algorithm follows its vector verbs
#include "attention.inl"

namespace clearhead {
extern const Kernel avx512_kernel;
const Kernel avx512_kernel = {"avx512", false, avx512::kMaxLanes, avx512::forward_scratch, avx512::forward_item, avx512::pack_values, avx512::exp2_array};
}  // namespace clearhead
