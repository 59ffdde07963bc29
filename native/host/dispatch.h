// Which kernel runs here, and how its work items are spread over threads.
#pragma once

#include <string>
#include <vector>

#include "host/kernel.h"

namespace clearhead {

// Names of the instruction sets that were built and that this machine has, best first.
std::vector<std::string> available();

// The kernel that runs, or null with `error` set: CLEARHEAD_ISA asks for one that is not there.
const Kernel* current(std::string& error);

// Choose by name; "" goes back to the best (or to CLEARHEAD_ISA). False if it is not there.
bool choose(const std::string& name);

// False where memory ran out.
bool forward(const Kernel& kernel, Forward& call, int threads);

bool backward(const Kernel& kernel, Backward& work, int threads);

// Multiply-adds at full speed on every thread, with an exponential for every `each` of them (0: none);
// how many operations the multiply-adds were together.
double peak(const Kernel& kernel, int64_t rounds, int64_t each, bool pairs, int threads);

}  // namespace clearhead
