// What one instruction set offers to dispatch.cpp, under its own name.
#define CLEARHEAD_JOIN_(a, b) a##b
#define CLEARHEAD_JOIN(a, b) CLEARHEAD_JOIN_(a, b)
#define CLEARHEAD_TEXT_(a) #a
#define CLEARHEAD_TEXT(a) CLEARHEAD_TEXT_(a)

namespace clearhead {

extern const Kernel CLEARHEAD_JOIN(CLEARHEAD_ISA, _kernel);
const Kernel CLEARHEAD_JOIN(CLEARHEAD_ISA, _kernel) = {
    CLEARHEAD_TEXT(CLEARHEAD_ISA),
    CLEARHEAD_ISA::Vec::has_dots,
    CLEARHEAD_ISA::kWide,
    CLEARHEAD_ISA::kMaxLanes,
    CLEARHEAD_ISA::forward_scratch,
    CLEARHEAD_ISA::forward_item,
    CLEARHEAD_ISA::pack_sources,
    CLEARHEAD_ISA::is_few,
    CLEARHEAD_ISA::few_chunks,
    CLEARHEAD_ISA::few_partial,
    CLEARHEAD_ISA::few_scratch,
    CLEARHEAD_ISA::few_item,
    CLEARHEAD_ISA::few_merge,
    CLEARHEAD_ISA::backward_scratch,
    CLEARHEAD_ISA::backward_item,
    CLEARHEAD_ISA::backward_rows,
    CLEARHEAD_ISA::backward_sum,
    CLEARHEAD_ISA::peak,
    CLEARHEAD_ISA::exp2_array,
};

}  // namespace clearhead
