// Vector verbs for AVX-512 (F, DQ, BW, VL), with bf16 dot products if the compiler flags allow them.
#pragma once

#include <immintrin.h>

#include "isa/numbers.h"

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

struct Vec {
  static constexpr int lanes = 16;
  // rows that a micro-kernel combines with one to four vectors
  static constexpr int rows_by_one = 8, rows_by_two = 8, rows_by_three = 4, rows_by_four = 4;
  static constexpr int wide = 4, vectors = 3;  // vectors of queries in a block: of the forward, of the backward
  static constexpr int together = 4;           // vectors that a micro-kernel takes at most
  static constexpr int outer = 4;              // vectors of features in the outer-product kernel
  using f = __m512;
  using i = __m512i;

  static f load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, f x) { _mm512_storeu_ps(p, x); }
  static f set1(float x) { return _mm512_set1_ps(x); }
  static f zero() { return _mm512_setzero_ps(); }
  static f add(f a, f b) { return _mm512_add_ps(a, b); }
  static f sub(f a, f b) { return _mm512_sub_ps(a, b); }
  static f mul(f a, f b) { return _mm512_mul_ps(a, b); }
  static f div(f a, f b) { return _mm512_div_ps(a, b); }
  static constexpr bool fused = true;  // fma and fms round once
  static f fma(f a, f b, f c) { return _mm512_fmadd_ps(a, b, c); }
  static f fms(f a, f b, f c) { return _mm512_fmsub_ps(a, b, c); }
  // returns b if either is a NaN
  static f max(f a, f b) { return _mm512_max_ps(a, b); }
  static f select(uint64_t bits, f yes, f no) { return _mm512_mask_blend_ps((__mmask16)bits, no, yes); }
  static uint64_t greater(f a, f b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static uint64_t not_finite(f x) { return _mm512_fpclass_ps_mask(x, 0x99); }
  static float sum(f x) { return _mm512_reduce_add_ps(x); }

  // lane k of the result is the sum of the lanes of rows[k]
  static f sum_each(const f* rows) {
    f quarter[4];
    for (int k = 0; k < 4; ++k) {
      const f a = rows[4 * k], b = rows[4 * k + 1], c = rows[4 * k + 2], d = rows[4 * k + 3];
      const f ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
      const f cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
      quarter[k] = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    }
    const f low =
        add(_mm512_shuffle_f32x4(quarter[0], quarter[1], 0x44), _mm512_shuffle_f32x4(quarter[0], quarter[1], 0xee));
    const f high =
        add(_mm512_shuffle_f32x4(quarter[2], quarter[3], 0x44), _mm512_shuffle_f32x4(quarter[2], quarter[3], 0xee));
    return add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }

  // One bit for each of 16 states of SplitMix64: whether the hash of state + step has upper 53 bits >= `least`
  static uint64_t hash_at_least(const uint64_t* state, uint64_t step, uint64_t least) {
    uint64_t bits = 0;
    for (int half = 0; half < 2; ++half) {
      i x = _mm512_add_epi64(_mm512_loadu_si512(state + 8 * half), _mm512_set1_epi64((int64_t)step));
      x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), _mm512_set1_epi64((int64_t)kHashFirst));
      x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), _mm512_set1_epi64((int64_t)kHashSecond));
      x = _mm512_srli_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 31)), 11);
      bits |= (uint64_t)_mm512_cmpge_epu64_mask(x, _mm512_set1_epi64((int64_t)least)) << (8 * half);
    }
    return bits;
  }

  static f same_bits(int32_t x) { return _mm512_castsi512_ps(_mm512_set1_epi32(x)); }
  static i load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
  static i set1_int(int32_t x) { return _mm512_set1_epi32(x); }
  static uint64_t greater_int(i a, i b) { return _mm512_cmpgt_epi32_mask(a, b); }

  static f load_as_float(const uint16_t* p, Type type) {
    __m256i x = _mm256_loadu_si256((const __m256i*)p);
    if (type == Type::f16) return _mm512_cvtph_ps(x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }

  // returns false, storing nothing, if there is no such conversion
  static bool store_as_half(uint16_t* p, f x, Type type) {
    if (type == Type::f16) {
      _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
      return true;
    }
    i bits = _mm512_castps_si512(x);
    const i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
    bits = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(bits));
    return true;
  }

  // to[j][i] = row(i)[j], 16 x 16
  template <class Row>
  static void transpose(Row row, float* to, int64_t to_stride) {
    f a[16], b[16];
    for (int k = 0; k < 16; ++k) a[k] = row(k);
    for (int k = 0; k < 16; k += 4) {
      const f ab_low = _mm512_unpacklo_ps(a[k], a[k + 1]), ab_high = _mm512_unpackhi_ps(a[k], a[k + 1]);
      const f cd_low = _mm512_unpacklo_ps(a[k + 2], a[k + 3]), cd_high = _mm512_unpackhi_ps(a[k + 2], a[k + 3]);
      b[k] = _mm512_shuffle_ps(ab_low, cd_low, 0x44), b[k + 1] = _mm512_shuffle_ps(ab_low, cd_low, 0xee);
      b[k + 2] = _mm512_shuffle_ps(ab_high, cd_high, 0x44), b[k + 3] = _mm512_shuffle_ps(ab_high, cd_high, 0xee);
    }
    for (int k = 0; k < 4; ++k) {  // b[4 r + k] holds the columns k, k + 4, k + 8, k + 12 of rows 4 r .. 4 r + 3
      const f low = _mm512_shuffle_f32x4(b[k], b[k + 4], 0x44), high = _mm512_shuffle_f32x4(b[k + 8], b[k + 12], 0x44);
      const f low2 = _mm512_shuffle_f32x4(b[k], b[k + 4], 0xee),
              high2 = _mm512_shuffle_f32x4(b[k + 8], b[k + 12], 0xee);
      store(to + k * to_stride, _mm512_shuffle_f32x4(low, high, 0x88));
      store(to + (k + 4) * to_stride, _mm512_shuffle_f32x4(low, high, 0xdd));
      store(to + (k + 8) * to_stride, _mm512_shuffle_f32x4(low2, high2, 0x88));
      store(to + (k + 12) * to_stride, _mm512_shuffle_f32x4(low2, high2, 0xdd));
    }
  }

  // 2^x, at most 1 ulp off if the result is normal; exact zero below -150, NaN for NaN.
  static f exp2(f x) {
    f r = _mm512_reduce_ps(x, 0x00);  // x - round(x), 0 for an infinity
    f n = _mm512_sub_ps(x, r);
    const f p = power_of_fraction<Vec>(r);
    return _mm512_scalef_ps(p, n);
  }

#ifdef __AVX512BF16__
#define CLEARHEAD_DOTS
  static constexpr bool has_dots = true;
  using pair = __m512bh;
  static pair load_pair(const uint32_t* p) { return (pair)_mm512_loadu_si512(p); }
  static pair set1_pair(const uint16_t* p) {
    int32_t both;
    __builtin_memcpy(&both, p, 4);
    return (pair)_mm512_set1_epi32(both);
  }
  static f dot(pair a, pair b, f c) { return _mm512_dpbf16_ps(c, a, b); }
  static void store_bf16_rows(uint16_t* first, uint16_t* second, f low, f high) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm256_storeu_si256((__m256i*)first, _mm512_castsi512_si256(both));
    _mm256_storeu_si256((__m256i*)second, _mm512_extracti64x4_epi64(both, 1));
  }
  // each lane holds (low, high) as one 32-bit pair, rounded to nearest even
  static f pair_of(f low, f high) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
  }
  static void store_pair(uint32_t* p, f low, f high) { store((float*)p, pair_of(low, high)); }
#else
  static constexpr bool has_dots = false;
#endif
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
