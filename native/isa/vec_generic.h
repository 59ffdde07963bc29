// Vector verbs on the compiler's 128-bit vector extension: the baseline on any machine.
#pragma once

#include <cmath>
#include <cstring>

#include "isa/numbers.h"

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

struct Vec {
  static constexpr int lanes = 4;
  // rows that a micro-kernel combines with one to four vectors
  static constexpr int rows_by_one = 8, rows_by_two = 6, rows_by_three = 4, rows_by_four = 3;
  static constexpr int wide = 3, vectors = 3;  // vectors of queries in a block: of the forward, of the backward
  static constexpr int together = 3;           // vectors that a micro-kernel takes at most
  static constexpr int outer = 2;              // vectors of features in the outer-product kernel
  typedef float f __attribute__((vector_size(16)));
  typedef int32_t i __attribute__((vector_size(16)));

  static f load(const float* p) {
    f x;
    std::memcpy(&x, p, 16);
    return x;
  }
  static void store(float* p, f x) { std::memcpy(p, &x, 16); }
  static f set1(float x) { return f{x, x, x, x}; }
  static f zero() { return f{0, 0, 0, 0}; }
  static f add(f a, f b) { return a + b; }
  static f sub(f a, f b) { return a - b; }
  static f mul(f a, f b) { return a * b; }
  static f div(f a, f b) { return a / b; }
  static constexpr bool fused = false;  // fma and fms round once
  static f fma(f a, f b, f c) { return a * b + c; }
  static f fms(f a, f b, f c) { return a * b - c; }
  // returns b if either is a NaN
  static f max(f a, f b) { return a > b ? a : b; }
  static f select(uint64_t bits, f yes, f no) {
    const i bit = {1, 2, 4, 8};
    const int32_t b = (int32_t)(bits & 15);
    return (i{b, b, b, b} & bit) != 0 ? yes : no;
  }
  static uint64_t greater(f a, f b) { return to_bits(a > b); }
  static uint64_t not_finite(f x) { return to_bits(~(magnitude(x) <= set1(__FLT_MAX__))); }
  static float sum(f x) { return (x[0] + x[2]) + (x[1] + x[3]); }

  // lane k of the result is the sum of the lanes of rows[k]
  static f sum_each(const f* rows) {
    float sums[lanes];
    for (int k = 0; k < lanes; ++k) sums[k] = sum(rows[k]);
    return load(sums);
  }

  // One bit for each of 4 states of SplitMix64: whether the hash of state + step has upper 53 bits >= `least`
  static uint64_t hash_at_least(const uint64_t* state, uint64_t step, uint64_t least) {
    return hash_each_at_least<Vec>(state, step, least);
  }

  static f same_bits(int32_t x) { return (f)i{x, x, x, x}; }
  static i load_int(const int32_t* p) {
    i x;
    std::memcpy(&x, p, 16);
    return x;
  }
  static i set1_int(int32_t x) { return i{x, x, x, x}; }
  static uint64_t greater_int(i a, i b) { return to_bits(a > b); }

  static f load_as_float(const uint16_t* p, Type type) {
    return f{widen(p[0], type), widen(p[1], type), widen(p[2], type), widen(p[3], type)};
  }

  // returns false, storing nothing, if there is no such conversion
  static bool store_as_half(uint16_t*, f, Type) { return false; }

  // to[j][i] = row(i)[j], 4 x 4
  template <class Row>
  static void transpose(Row row, float* to, int64_t to_stride) {
    const f a[4] = {row(0), row(1), row(2), row(3)};
    for (int j = 0; j < 4; ++j) store(to + j * to_stride, f{a[0][j], a[1][j], a[2][j], a[3][j]});
  }

  // 2^x, at most 2 ulp off if the result is normal; zero below -126, NaN for NaN.
  static f exp2(f x) {
    const f low = set1(-127.f), high = set1(128.f);
    x = low > x ? low : x;  // NaN stays NaN
    const f clamped = high < x ? high : x;
    const f magic = set1(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const f shifted = clamped + magic;
    const f r = clamped - (shifted - magic);
    const f p = power_of_fraction<Vec>(r);
    i n, exponent;
    std::memcpy(&n, &shifted, 16);
    n = (n << 9) >> 9;           // the low 23 bits, signed
    exponent = (n + 127) << 23;  // 0 for n = -127, infinity for 128
    f power;
    std::memcpy(&power, &exponent, 16);
    return p * power;
  }

  static constexpr bool has_dots = false;

 private:
  static uint64_t to_bits(i x) { return (x[0] & 1) | (x[1] & 2) | (x[2] & 4) | (x[3] & 8); }
  static f magnitude(f x) {
    i bits;
    std::memcpy(&bits, &x, 16);
    bits &= 0x7fffffff;
    std::memcpy(&x, &bits, 16);
    return x;
  }
  static float widen(uint16_t x, Type type) {
    uint32_t bits = (uint32_t)x << 16;
    float result;
    if (type == Type::f16) {
      const uint32_t sign = bits & 0x80000000, size = x & 0x7fff;
      if (size >= 0x7c00) {
        bits = sign | 0x7f800000 | (size & 0x3ff) << 13;
      } else {
        const float value = (size >> 10 ? (float)((size & 0x3ff) | 0x400) : (float)size);
        return std::ldexp(sign ? -value : value, (size >> 10 ? (int)(size >> 10) : 1) - 25);
      }
    }
    std::memcpy(&result, &bits, 4);
    return result;
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
