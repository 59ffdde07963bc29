#define CLEARHEAD_ISA neon
#include "isa/vec_neon.h"
// the algorithm follows its vector verbs
#include "algorithm/attention.inl"
