// Vector verbs for 64-bit ARM, which always has NEON, with bf16 dot products if the compiler flags allow them.
#pragma once

#include <arm_neon.h>

#include "isa/numbers.h"

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

struct Vec {
  static constexpr int lanes = 4;
  // rows that a micro-kernel combines with one to four vectors; with three, 24 sums, 3 columns and a broadcast take 28
  // of 32 registers
  static constexpr int rows_by_one = 16, rows_by_two = 12, rows_by_three = 8, rows_by_four = 6;
  static constexpr int wide = 4, vectors = 3;  // vectors of queries in a block: of the forward, of the backward
  static constexpr int together = 4;           // vectors that a micro-kernel takes at most
  static constexpr int outer = 4;              // vectors of features in the outer-product kernel
  using f = float32x4_t;
  using i = int32x4_t;

  static f load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, f x) { vst1q_f32(p, x); }
  static f set1(float x) { return vdupq_n_f32(x); }
  static f zero() { return vdupq_n_f32(0); }
  static f add(f a, f b) { return vaddq_f32(a, b); }
  static f sub(f a, f b) { return vsubq_f32(a, b); }
  static f mul(f a, f b) { return vmulq_f32(a, b); }
  static f div(f a, f b) { return vdivq_f32(a, b); }
  static constexpr bool fused = true;  // fma and fms round once
  static f fma(f a, f b, f c) { return vfmaq_f32(c, a, b); }
  static f fms(f a, f b, f c) { return vfmaq_f32(vnegq_f32(c), a, b); }
  // returns b if either is a NaN
  static f max(f a, f b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static f select(uint64_t bits, f yes, f no) {
    return vbslq_f32(vtstq_u32(vdupq_n_u32((uint32_t)bits), bit_of_lane()), yes, no);
  }
  static uint64_t greater(f a, f b) { return to_bits(vcgtq_f32(a, b)); }
  static uint64_t not_finite(f x) { return to_bits(vmvnq_u32(vcaleq_f32(x, set1(__FLT_MAX__)))); }
  static float sum(f x) { return vaddvq_f32(x); }

  // lane k of the result is the sum of the lanes of rows[k]
  static f sum_each(const f* rows) { return vpaddq_f32(vpaddq_f32(rows[0], rows[1]), vpaddq_f32(rows[2], rows[3])); }

  // One bit for each of 4 states of SplitMix64: whether the hash of state + step has upper 53 bits >= `least`. In
  // scalars, since NEON has no 64-bit multiplication of vectors.
  static uint64_t hash_at_least(const uint64_t* state, uint64_t step, uint64_t least) {
    return hash_each_at_least<Vec>(state, step, least);
  }

  static f same_bits(int32_t x) { return vreinterpretq_f32_s32(vdupq_n_s32(x)); }
  static i load_int(const int32_t* p) { return vld1q_s32(p); }
  static i set1_int(int32_t x) { return vdupq_n_s32(x); }
  static uint64_t greater_int(i a, i b) { return to_bits(vcgtq_s32(a, b)); }

  static f load_as_float(const uint16_t* p, Type type) {
    const uint16x4_t x = vld1_u16(p);
    if (type == Type::f16) return vcvt_f32_f16(vreinterpret_f16_u16(x));
    return vreinterpretq_f32_u32(vshll_n_u16(x, 16));
  }

  // returns false, storing nothing, if there is no such conversion
  static bool store_as_half(uint16_t* p, f x, Type type) {
    if (type == Type::f16) {
      vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
      return true;
    }
    const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff));
    vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000)), 16));
    return true;
  }

  // to[j][i] = row(i)[j], 4 x 4
  template <class Row>
  static void transpose(Row row, float* to, int64_t to_stride) {
    const f a = row(0), b = row(1), c = row(2), d = row(3);
    const float64x2_t ab_even = vreinterpretq_f64_f32(vtrn1q_f32(a, b)),
                      ab_odd = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
    const float64x2_t cd_even = vreinterpretq_f64_f32(vtrn1q_f32(c, d)),
                      cd_odd = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
    store(to, vreinterpretq_f32_f64(vtrn1q_f64(ab_even, cd_even)));
    store(to + to_stride, vreinterpretq_f32_f64(vtrn1q_f64(ab_odd, cd_odd)));
    store(to + 2 * to_stride, vreinterpretq_f32_f64(vtrn2q_f64(ab_even, cd_even)));
    store(to + 3 * to_stride, vreinterpretq_f32_f64(vtrn2q_f64(ab_odd, cd_odd)));
  }

  // 2^x, at most 1 ulp off if the result is normal; zero below -126, NaN for NaN.
  static f exp2(f x) {
    x = vminq_f32(vmaxq_f32(x, set1(-127.f)), set1(128.f));  // NaN stays NaN
    const f n = vrndnq_f32(x);
    const f r = sub(x, n);
    const f p = power_of_fraction<Vec>(r);
    const i exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    return mul(p, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));  // 0 for n = -127
  }

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define CLEARHEAD_DOTS
  static constexpr bool has_dots = true;
  using pair = bfloat16x8_t;
  static pair load_pair(const uint32_t* p) { return vreinterpretq_bf16_u32(vld1q_u32(p)); }
  static pair set1_pair(const uint16_t* p) {
    uint32_t both;
    __builtin_memcpy(&both, p, 4);
    return vreinterpretq_bf16_u32(vdupq_n_u32(both));
  }
  static f dot(pair a, pair b, f c) { return vbfdotq_f32(c, a, b); }
  static void store_bf16_rows(uint16_t* first, uint16_t* second, f low, f high) {
    vst1_u16(first, vreinterpret_u16_bf16(vcvt_bf16_f32(low)));
    vst1_u16(second, vreinterpret_u16_bf16(vcvt_bf16_f32(high)));
  }
  // each lane holds (low, high) as one 32-bit pair, rounded to nearest even
  static f pair_of(f low, f high) {
    const uint16x4_t a = vreinterpret_u16_bf16(vcvt_bf16_f32(low)), b = vreinterpret_u16_bf16(vcvt_bf16_f32(high));
    return vreinterpretq_f32_u16(vcombine_u16(vzip1_u16(a, b), vzip2_u16(a, b)));
  }
  static void store_pair(uint32_t* p, f low, f high) { store((float*)p, pair_of(low, high)); }
#else
  static constexpr bool has_dots = false;
#endif

 private:
  static uint32x4_t bit_of_lane() { return uint32x4_t{1, 2, 4, 8}; }
  static uint64_t to_bits(uint32x4_t set) { return vaddvq_u32(vandq_u32(set, bit_of_lane())); }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
