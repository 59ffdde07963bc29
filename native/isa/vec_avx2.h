// Vector verbs for AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "isa/numbers.h"

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

struct Vec {
  static constexpr int lanes = 8;
  // rows that a micro-kernel combines with one to four vectors; with three, 12 sums, 3 columns and a broadcast take all
  // 16 registers
  static constexpr int rows_by_one = 8, rows_by_two = 6, rows_by_three = 4, rows_by_four = 3;
  static constexpr int wide = 6, vectors = 3;  // vectors of queries in a block: of the forward, of the backward
  static constexpr int together = 3;           // vectors that a micro-kernel takes at most
  static constexpr int outer = 2;              // vectors of features in the outer-product kernel
  using f = __m256;
  using i = __m256i;

  static f load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, f x) { _mm256_storeu_ps(p, x); }
  static f set1(float x) { return _mm256_set1_ps(x); }
  static f zero() { return _mm256_setzero_ps(); }
  static f add(f a, f b) { return _mm256_add_ps(a, b); }
  static f sub(f a, f b) { return _mm256_sub_ps(a, b); }
  static f mul(f a, f b) { return _mm256_mul_ps(a, b); }
  static f div(f a, f b) { return _mm256_div_ps(a, b); }
  static constexpr bool fused = true;  // fma and fms round once
  static f fma(f a, f b, f c) { return _mm256_fmadd_ps(a, b, c); }
  static f fms(f a, f b, f c) { return _mm256_fmsub_ps(a, b, c); }
  // returns b if either is a NaN
  static f max(f a, f b) { return _mm256_max_ps(a, b); }
  static f select(uint64_t bits, f yes, f no) {
    const i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const i set = _mm256_and_si256(_mm256_set1_epi32((int32_t)(bits & 255)), bit);
    return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit)));
  }
  static uint64_t greater(f a, f b) { return (uint64_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
  static uint64_t not_finite(f x) {
    const f size = _mm256_andnot_ps(set1(-0.f), x);
    return (uint64_t)_mm256_movemask_ps(_mm256_cmp_ps(size, set1(__FLT_MAX__), _CMP_NLE_UQ));
  }
  static float sum(f x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

  // lane k of the result is the sum of the lanes of rows[k]
  static f sum_each(const f* rows) {
    float sums[lanes];
    for (int k = 0; k < lanes; ++k) sums[k] = sum(rows[k]);
    return load(sums);
  }

  // One bit for each of 8 states of SplitMix64: whether the hash of state + step has upper 53 bits >= `least`
  static uint64_t hash_at_least(const uint64_t* state, uint64_t step, uint64_t least) {
    uint64_t bits = 0;
    for (int half = 0; half < 2; ++half) {
      i x = _mm256_add_epi64(_mm256_loadu_si256((const i*)(state + 4 * half)), _mm256_set1_epi64x((int64_t)step));
      x = times(_mm256_xor_si256(x, _mm256_srli_epi64(x, 30)), kHashFirst);
      x = times(_mm256_xor_si256(x, _mm256_srli_epi64(x, 27)), kHashSecond);
      x = _mm256_srli_epi64(_mm256_xor_si256(x, _mm256_srli_epi64(x, 31)), 11);
      const i below = _mm256_cmpgt_epi64(_mm256_set1_epi64x((int64_t)least), x);
      bits |= (uint64_t)(~_mm256_movemask_pd(_mm256_castsi256_pd(below)) & 15) << (4 * half);
    }
    return bits;
  }

  static f same_bits(int32_t x) { return _mm256_castsi256_ps(_mm256_set1_epi32(x)); }
  static i load_int(const int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static i set1_int(int32_t x) { return _mm256_set1_epi32(x); }
  static uint64_t greater_int(i a, i b) {
    return (uint64_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b)));
  }

  static f load_as_float(const uint16_t* p, Type type) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    if (type == Type::f16) return _mm256_cvtph_ps(x);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }

  // returns false, storing nothing, if there is no such conversion
  static bool store_as_half(uint16_t* p, f x, Type type) {
    if (type != Type::f16) return false;
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    return true;
  }

  // to[j][i] = row(i)[j], 8 x 8
  template <class Row>
  static void transpose(Row row, float* to, int64_t to_stride) {
    f b[8];
    for (int k = 0; k < 8; k += 4) {
      const f a0 = row(k), a1 = row(k + 1), a2 = row(k + 2), a3 = row(k + 3);
      const f ab_low = _mm256_unpacklo_ps(a0, a1), ab_high = _mm256_unpackhi_ps(a0, a1);
      const f cd_low = _mm256_unpacklo_ps(a2, a3), cd_high = _mm256_unpackhi_ps(a2, a3);
      b[k] = _mm256_shuffle_ps(ab_low, cd_low, 0x44), b[k + 1] = _mm256_shuffle_ps(ab_low, cd_low, 0xee);
      b[k + 2] = _mm256_shuffle_ps(ab_high, cd_high, 0x44), b[k + 3] = _mm256_shuffle_ps(ab_high, cd_high, 0xee);
    }
    for (int k = 0; k < 4; ++k) {
      store(to + k * to_stride, _mm256_permute2f128_ps(b[k], b[k + 4], 0x20));
      store(to + (k + 4) * to_stride, _mm256_permute2f128_ps(b[k], b[k + 4], 0x31));
    }
  }

  // 2^x, at most 1 ulp off if the result is normal; zero below -126, NaN for NaN.
  static f exp2(f x) {
    x = _mm256_max_ps(set1(-127.f), x);  // NaN stays NaN
    x = _mm256_min_ps(set1(128.f), x);
    const f magic = set1(12582912.f + 127);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const f shifted = add(x, magic);
    const f r = sub(x, sub(shifted, magic));
    const f p = power_of_fraction<Vec>(r);
    const i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);  // 0 for -127, infinity for 128
    return mul(p, _mm256_castsi256_ps(exponent));
  }

  static constexpr bool has_dots = false;

 private:
  static i times(i a, uint64_t factor) {  // the lower 64 bits
    const i low = _mm256_set1_epi64x((int64_t)factor), high = _mm256_set1_epi64x((int64_t)(factor >> 32));
    const i cross = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), low), _mm256_mul_epu32(a, high));
    return _mm256_add_epi64(_mm256_mul_epu32(a, low), _mm256_slli_epi64(cross, 32));
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
