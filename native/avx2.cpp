#define CLEARHEAD_ISA avx2
#include "vec_avx2.h"
// the algorithm follows its vector verbs
#include "attention.inl"
