// The micro-kernels: rows times packed lanes, and weights times values. After common.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// How two operands meet: fp32 one feature at a time, or bf16 in pairs.
struct Single {
  using scalar = float;
  using packed = float;
  using vec = f;
  static constexpr int step = 1;
  static vec broadcast(const scalar* p) { return Vec::set1(*p); }
  static vec load(const packed* p) { return Vec::load(p); }
  static f mac(vec a, vec b, f c) { return Vec::fma(a, b, c); }
};

#ifdef CLEARHEAD_DOTS
struct Pair {
  using scalar = uint16_t;
  using packed = uint32_t;
  using vec = Vec::pair;
  static constexpr int step = 2;
  static vec broadcast(const scalar* p) { return Vec::set1_pair(p); }
  static vec load(const packed* p) { return Vec::load_pair(p); }
  static f mac(vec a, vec b, f c) { return Vec::dot(a, b, c); }
};
#endif

#define CLEARHEAD_UNROLL _Pragma("GCC unroll 8")

// result[r][lane] = sum_i rows[r][i] * packed[i][lane], for R rows and W vectors of lanes
template <class E, int R, int W>
inline void dot_rows(const typename E::scalar* rows, int64_t stride, const typename E::packed* packed,
                     int64_t depth, float* result) {
  f sum[R][W];
  CLEARHEAD_UNROLL for (int r = 0; r < R; ++r)
    CLEARHEAD_UNROLL for (int j = 0; j < W; ++j) sum[r][j] = Vec::zero();
  for (int64_t i = 0; i < depth; ++i) {
    typename E::vec column[W];
    CLEARHEAD_UNROLL for (int j = 0; j < W; ++j) column[j] = E::load(packed + (i * W + j) * N);
    CLEARHEAD_UNROLL for (int r = 0; r < R; ++r) {
      const typename E::vec x = E::broadcast(rows + r * stride + i * E::step);
      CLEARHEAD_UNROLL for (int j = 0; j < W; ++j) sum[r][j] = E::mac(x, column[j], sum[r][j]);
    }
  }
  CLEARHEAD_UNROLL for (int r = 0; r < R; ++r)
    CLEARHEAD_UNROLL for (int j = 0; j < W; ++j) Vec::store(result + (r * W + j) * N, sum[r][j]);
}

template <class E, int W>
void dot_tile(const typename E::scalar* rows, int64_t stride, int64_t count, const typename E::packed* packed,
              int64_t depth, float* result) {
  int64_t r = 0;
  for (; r + Vec::rows <= count; r += Vec::rows)
    dot_rows<E, Vec::rows, W>(rows + r * stride, stride, packed, depth, result + r * W * N);
  for (; r + 2 <= count; r += 2) dot_rows<E, 2, W>(rows + r * stride, stride, packed, depth, result + r * W * N);
  if (r < count) dot_rows<E, 1, W>(rows + r * stride, stride, packed, depth, result + r * W * N);
}

// out[r][lane] = out[r][lane] * rescale[lane] + sum_s weights[s][lane] * values[s][r], for R features
template <class E, int R, int W>
inline void mix_rows(const typename E::scalar* values, int64_t stride, int64_t count,
                     const typename E::packed* weights, const float* rescale, float* out) {
  f sum[R][W];
  CLEARHEAD_UNROLL for (int r = 0; r < R; ++r)
    CLEARHEAD_UNROLL for (int j = 0; j < W; ++j) sum[r][j] = Vec::zero();
  for (int64_t s = 0; s < count; ++s) {
    typename E::vec weight[W];
    CLEARHEAD_UNROLL for (int j = 0; j < W; ++j) weight[j] = E::load(weights + (s * W + j) * N);
    CLEARHEAD_UNROLL for (int r = 0; r < R; ++r) {
      const typename E::vec x = E::broadcast(values + s * stride + r * E::step);
      CLEARHEAD_UNROLL for (int j = 0; j < W; ++j) sum[r][j] = E::mac(x, weight[j], sum[r][j]);
    }
  }
  // a tile's sum on its own first: few roundings at the size of the whole
  CLEARHEAD_UNROLL for (int r = 0; r < R; ++r)
    CLEARHEAD_UNROLL for (int j = 0; j < W; ++j) {
      float* place = out + (r * W + j) * N;
      Vec::store(place, Vec::fma(Vec::load(place), Vec::load(rescale + j * N), sum[r][j]));
    }
}

template <class E, int W>
void mix_tile(const typename E::scalar* values, int64_t stride, int64_t count, const typename E::packed* weights,
              const float* rescale, int64_t width, float* out) {
  int64_t r = 0;
  for (; r + Vec::rows <= width; r += Vec::rows)
    mix_rows<E, Vec::rows, W>(values + r * E::step, stride, count, weights, rescale, out + r * W * N);
  for (; r + 2 <= width; r += 2)
    mix_rows<E, 2, W>(values + r * E::step, stride, count, weights, rescale, out + r * W * N);
  if (r < width) mix_rows<E, 1, W>(values + r * E::step, stride, count, weights, rescale, out + r * W * N);
}

// The same where some masked value is not finite: 0 * NaN would reach rows that may not read it.
template <int W>
void mix_selected(const float* values, int64_t stride, int64_t count, const float* weights, const uint64_t* allowed,
                  const float* rescale, int64_t width, float* out) {
  for (int64_t r = 0; r < width; ++r)
    for (int j = 0; j < W; ++j) {
      f sum = Vec::zero();
      for (int64_t s = 0; s < count; ++s) {
        const f next = Vec::fma(Vec::set1(values[s * stride + r]), Vec::load(weights + (s * W + j) * N), sum);
        sum = Vec::select(allowed[s] >> (j * N), next, sum);
      }
      float* place = out + (r * W + j) * N;
      Vec::store(place, Vec::fma(Vec::load(place), Vec::load(rescale + j * N), sum));
    }
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
