#define CLEARHEAD_ISA baseline
#include "isa/vec_generic.h"
// the algorithm follows its vector verbs
#include "algorithm/attention.inl"
