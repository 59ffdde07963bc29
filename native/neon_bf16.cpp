#define CLEARHEAD_ISA neon_bf16
#include "vec_neon.h"
// the algorithm follows its vector verbs
#include "attention.inl"
