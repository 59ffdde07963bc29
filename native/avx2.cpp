#define CLEARHEAD_ISA avx2
#include "vec_avx2.h"
// the algorithm follows its vector verbs
#include "attention.inl"

namespace clearhead {
extern const Kernel avx2_kernel;
const Kernel avx2_kernel = {"avx2", false, avx2::kMaxLanes, avx2::forward_scratch, avx2::forward_item, avx2::pack_values, avx2::exp2_array};
}  // namespace clearhead
