#define CLEARHEAD_ISA baseline
#include "vec_generic.h"
// the algorithm follows its vector verbs
#include "attention.inl"

namespace clearhead {
extern const Kernel baseline_kernel;
const Kernel baseline_kernel = {"baseline", false, baseline::kMaxLanes, baseline::forward_scratch, baseline::forward_item, baseline::pack_values, baseline::exp2_array};
}  // namespace clearhead
