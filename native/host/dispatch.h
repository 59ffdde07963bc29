// Chooses the kernel, and runs its work items on several threads.
#pragma once

#include <string>
#include <vector>

#include "host/kernel.h"

namespace clearhead {

// The names of the instruction sets that were built and that this machine supports, best first.
std::vector<std::string> available();

// The kernel that runs, or null with `error` set if CLEARHEAD_ISA names one that is not available.
const Kernel* current(std::string& error);

// Chooses a kernel by name; "" returns to CLEARHEAD_ISA or else the best one. Returns false if it is not available.
bool choose(const std::string& name);

// Both return false if memory ran out.
bool forward(const Kernel& kernel, Forward& call, int threads);
bool backward(const Kernel& kernel, Backward& work, int threads);

// Runs multiply-adds at full speed on all threads, with an exponential for every `each` of them (none for 0), and
// returns the number of floating-point operations in the multiply-adds.
double peak(const Kernel& kernel, int64_t rounds, int64_t each, bool pairs, int threads);

}  // namespace clearhead
