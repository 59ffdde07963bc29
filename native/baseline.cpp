#define CLEARHEAD_ISA baseline
#include "vec_generic.h"
// the algorithm follows its vector verbs
#include "attention.inl"
