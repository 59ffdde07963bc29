#define CLEARHEAD_ISA avx512_bf16
#include "isa/vec_avx512.h"
// the algorithm follows its vector verbs
#include "algorithm/attention.inl"
