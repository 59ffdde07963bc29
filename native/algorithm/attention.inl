// The algorithm, once for every instruction set: queries lie in the lanes (S^T = K Q^T), so that a
// row's maximum, sum, mask and statistics are vertical operations on vectors of queries. Only Q is
// packed, transposed to [feature][lane]; K and V are read where they lie, by scalar broadcast.
//
// The including file defines CLEARHEAD_ISA and, in that namespace, the vector verbs `Vec`.
#include "algorithm/common.inl"
#include "algorithm/dropout.inl"
#include "algorithm/micro.inl"
#include "algorithm/load.inl"
#include "algorithm/masks.inl"
#include "algorithm/scores.inl"
#include "algorithm/forward/forward.inl"
#include "algorithm/backward/outer.inl"
#include "algorithm/backward/changes.inl"
#include "algorithm/backward/backward.inl"
#include "algorithm/decode.inl"
#include "algorithm/limits.inl"
#include "algorithm/kernel.inl"
