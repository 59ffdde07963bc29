#define CLEARHEAD_ISA avx512
#include "vec_avx512.h"
// the algorithm follows its vector verbs
#include "attention.inl"
