// The kernels of one instruction set, under its own name, for dispatch.cpp.
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
    CLEARHEAD_ISA::is_decode,         // is_decode
    CLEARHEAD_ISA::decode_chunks,     // decode_chunks
    CLEARHEAD_ISA::decode_partial,    // decode_partial
    CLEARHEAD_ISA::decode_scratch,    // decode_scratch
    CLEARHEAD_ISA::decode_item,       // decode
    CLEARHEAD_ISA::decode_merge,      // decode_merge
    CLEARHEAD_ISA::backward_scratch,  // backward_scratch
    CLEARHEAD_ISA::backward_item,     // backward
    CLEARHEAD_ISA::backward_rows,     // backward_rows
    CLEARHEAD_ISA::backward_sum,      // backward_sum
    CLEARHEAD_ISA::peak,              // peak
    CLEARHEAD_ISA::exp2_array,        // exp2
};

}  // namespace clearhead
