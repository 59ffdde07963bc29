#define CLEARHEAD_ISA avx2
#include "isa/vec_avx2.h"
// the algorithm follows its vector verbs
#include "algorithm/attention.inl"
