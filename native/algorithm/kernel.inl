// What one instruction set offers to dispatch.cpp, under its own name.
#define CLEARHEAD_JOIN_(a, b) a##b
#define CLEARHEAD_JOIN(a, b) CLEARHEAD_JOIN_(a, b)
#define CLEARHEAD_TEXT_(a) #a
#define CLEARHEAD_TEXT(a) CLEARHEAD_TEXT_(a)

namespace clearhead {

extern const Kernel CLEARHEAD_JOIN(CLEARHEAD_ISA, _kernel);
const Kernel CLEARHEAD_JOIN(CLEARHEAD_ISA, _kernel) = {
    CLEARHEAD_TEXT(CLEARHEAD_ISA),    // name
    CLEARHEAD_ISA::Vec::has_dots,     // dots_bf16
    CLEARHEAD_ISA::kWide,             // block
    CLEARHEAD_ISA::kMaxLanes,         // backward_block
    CLEARHEAD_ISA::forward_scratch,   // forward_scratch
    CLEARHEAD_ISA::forward_item,      // forward
    CLEARHEAD_ISA::pack_sources,      // pack_sources
    CLEARHEAD_ISA::is_few,            // is_few
    CLEARHEAD_ISA::few_chunks,        // few_chunks
    CLEARHEAD_ISA::few_partial,       // few_partial
    CLEARHEAD_ISA::few_scratch,       // few_scratch
    CLEARHEAD_ISA::few_item,          // few
    CLEARHEAD_ISA::few_merge,         // few_merge
    CLEARHEAD_ISA::backward_scratch,  // backward_scratch
    CLEARHEAD_ISA::backward_item,     // backward
    CLEARHEAD_ISA::backward_rows,     // backward_rows
    CLEARHEAD_ISA::backward_sum,      // backward_sum
    CLEARHEAD_ISA::peak,              // peak
    CLEARHEAD_ISA::exp2_array,        // exp2
};

}  // namespace clearhead
