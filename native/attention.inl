// The algorithm, once for every instruction set: queries lie in the lanes (S^T = K Q^T), so that a
// row's maximum, sum, mask and statistics are vertical operations on vectors of queries. Only Q is
// packed, transposed to [feature][lane]; K and V are read where they lie, by scalar broadcast.
//
// The including file defines CLEARHEAD_ISA and, in that namespace, the vector verbs `Vec`.
#include "common.inl"
#include "dropout.inl"
#include "micro.inl"
#include "load.inl"
#include "masks.inl"
#include "scores.inl"
#include "forward.inl"
#include "outer.inl"
#include "changes.inl"
#include "backward.inl"
#include "decode.inl"
#include "limits.inl"
#include "kernel.inl"
