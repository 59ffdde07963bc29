#define CLEARHEAD_ISA avx512
#include "vec_avx512.h"
// the algorithm follows its vector verbs
#include "attention.inl"
#include "backward.inl"
#include "decode.inl"
#include "limits.inl"
#include "kernel.inl"
