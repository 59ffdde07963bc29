#define CLEARHEAD_ISA neon_bf16
#include "isa/vec_neon.h"
// the algorithm follows its vector verbs
#include "algorithm/attention.inl"
