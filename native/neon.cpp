#define CLEARHEAD_ISA neon
#include "vec_neon.h"
// the algorithm follows its vector verbs
#include "attention.inl"
