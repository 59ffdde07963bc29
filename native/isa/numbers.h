// What the verbs of all instruction sets share: the polynomial of 2^x, and the hash SplitMix64 (Steele, Lea, Flood
// 2014). Each instruction set has its own copy in its namespace, so that the linker never shares code between them.
#pragma once

#include "host/kernel.h"

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// 2^r on [-0.5, 0.5]
template <class V>
inline __attribute__((always_inline)) typename V::f power_of_fraction(typename V::f r) {
  typename V::f p = V::set1(0x1.41fbbcp-13f);
  p = V::fma(p, r, V::set1(0x1.5f3e54p-10f));
  p = V::fma(p, r, V::set1(0x1.3b2d4cp-7f));
  p = V::fma(p, r, V::set1(0x1.c6aee8p-5f));
  p = V::fma(p, r, V::set1(0x1.ebfbdcp-3f));
  p = V::fma(p, r, V::set1(0x1.62e430p-1f));
  return V::fma(p, r, V::set1(1.0f));
}

constexpr uint64_t kHashFirst = 0xbf58476d1ce4e5b9u, kHashSecond = 0x94d049bb133111ebu;

// `hash_at_least` for vectors without 64-bit multiplication
template <class V>
inline uint64_t hash_each_at_least(const uint64_t* state, uint64_t step, uint64_t least) {
  uint64_t bits = 0;
  for (int lane = 0; lane < V::lanes; ++lane) {
    uint64_t x = state[lane] + step;
    x = (x ^ x >> 30) * kHashFirst;
    x = (x ^ x >> 27) * kHashSecond;
    bits |= (uint64_t)((x ^ x >> 31) >> 11 >= least) << lane;
  }
  return bits;
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
