#define CLEARHEAD_ISA baseline
#include "vec_generic.h"
// the algorithm follows its vector verbs
#include "attention.inl"
#include "backward.inl"
#include "decode.inl"
#include "limits.inl"
#include "kernel.inl"
