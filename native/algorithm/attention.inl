// The algorithm, once for all instruction sets: queries lie in the lanes (S^T = K Q^T), so that the maximum, sum, mask
// and statistics of a row are vertical operations on vectors of queries. Only Q is packed, transposed to
// [feature][lane]; K and V are read in place by scalar broadcast.
//
// The including file defines CLEARHEAD_ISA and, in that namespace, the vector verbs `Vec`. Each part follows the parts
// that it uses.
#include "algorithm/common.inl"
#include "algorithm/dropout.inl"
#include "algorithm/micro.inl"
#include "algorithm/load.inl"
#include "algorithm/masks.inl"
#include "algorithm/scores.inl"
#include "algorithm/forward/parts.inl"
#include "algorithm/forward/prefetch.inl"
#include "algorithm/forward/products.inl"
#include "algorithm/forward/softmax.inl"
#include "algorithm/forward/select.inl"
#include "algorithm/forward/top.inl"
#include "algorithm/forward/context.inl"
#include "algorithm/forward/strip.inl"
#include "algorithm/forward/block.inl"
#include "algorithm/decode.inl"
#include "algorithm/backward/outer.inl"
#include "algorithm/backward/rows.inl"
#include "algorithm/backward/sources.inl"
#include "algorithm/backward/reading_gradients.inl"
#include "algorithm/backward/block.inl"
#include "algorithm/backward/items.inl"
#include "algorithm/peak.inl"
#include "algorithm/kernel.inl"
