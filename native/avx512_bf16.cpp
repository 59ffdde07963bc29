#define CLEARHEAD_ISA avx512_bf16
#include "vec_avx512.h"
// the algorithm follows its vector verbs
#include "attention.inl"
