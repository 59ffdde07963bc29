// The micro-kernels: products of rows with packed lanes, and weighted sums of values. After common.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// The element types of a product: fp32, one feature at a time, or bf16 in pairs.
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
  static void pack(packed* p, f low, f high) { Vec::store_pair(p, low, high); }
};
#endif

#define CLEARHEAD_UNROLL_FOR _Pragma("GCC unroll 16") for

// How many rows (or features) are combined with V vectors of lanes at once: as many sums as fit in the registers.
template <int V>
constexpr int kRowsBy = V == 1   ? Vec::rows_by_one
                        : V == 2 ? Vec::rows_by_two
                        : V == 3 ? Vec::rows_by_three
                                 : Vec::rows_by_four;

// The inner loops are not inlined: inlined they compete for registers with the surrounding code, and on machines with
// 16 registers the compiler then reloads a vector for each multiply-add or spills the sums.
#define CLEARHEAD_NOINLINE __attribute__((noinline))

// result[r][lane] = sum_i rows[r][i] * packed[i][lane], for R rows and V vectors of the `lanes`
template <class E, int R, int V>
CLEARHEAD_NOINLINE void dot_rows(const typename E::scalar* rows, int64_t stride, const typename E::packed* packed,
                                 int64_t lanes, int64_t depth, float* result) {
  f sum[R][V];
  CLEARHEAD_UNROLL_FOR (int r = 0; r < R; ++r)
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) sum[r][j] = Vec::zero();
  for (int64_t i = 0; i < depth; ++i, packed += lanes, rows += E::step) {
    typename E::vec column[V];
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) column[j] = E::load(packed + j * N);
    CLEARHEAD_UNROLL_FOR (int r = 0; r < R; ++r) {
      const typename E::vec x = E::broadcast(rows + r * stride);
      CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) sum[r][j] = E::mac(x, column[j], sum[r][j]);
    }
  }
  CLEARHEAD_UNROLL_FOR (int r = 0; r < R; ++r)
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) Vec::store(result + r * lanes + j * N, sum[r][j]);
}

template <class E, int V>
void dot_part(const typename E::scalar* rows, int64_t stride, int64_t count, const typename E::packed* packed,
              int64_t lanes, int64_t depth, float* result) {
  constexpr int R = kRowsBy<V>;
  int64_t r = 0;
  for (; r + R <= count; r += R) dot_rows<E, R, V>(rows + r * stride, stride, packed, lanes, depth, result + r * lanes);
  for (; R > 4 && r + 4 <= count; r += 4)
    dot_rows<E, 4, V>(rows + r * stride, stride, packed, lanes, depth, result + r * lanes);
  for (; r + 2 <= count; r += 2) dot_rows<E, 2, V>(rows + r * stride, stride, packed, lanes, depth, result + r * lanes);
  if (r < count) dot_rows<E, 1, V>(rows + r * stride, stride, packed, lanes, depth, result + r * lanes);
}

// out[r][lane] = out[r][lane] * rescale[lane] + sum_s weights[s][lane] * values[s][r], for R features;
// without `rescale` only the sum is stored
template <class E, int R, int V>
CLEARHEAD_NOINLINE void accumulate_rows(const typename E::scalar* values, int64_t stride, int64_t count,
                                        const typename E::packed* weights, int64_t lanes, const float* rescale,
                                        float* out) {
  f sum[R][V];
  CLEARHEAD_UNROLL_FOR (int r = 0; r < R; ++r)
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) sum[r][j] = Vec::zero();
  for (int64_t s = 0; s < count; ++s, values += stride, weights += lanes) {
    typename E::vec weight[V];
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) weight[j] = E::load(weights + j * N);
    CLEARHEAD_UNROLL_FOR (int r = 0; r < R; ++r) {
      const typename E::vec x = E::broadcast(values + r * E::step);
      CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) sum[r][j] = E::mac(x, weight[j], sum[r][j]);
    }
  }
  // The tile is summed first and added once, so that few roundings happen at the magnitude of the whole sum.
  CLEARHEAD_UNROLL_FOR (int r = 0; r < R; ++r)
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) {
      float* place = out + r * lanes + j * N;
      Vec::store(place, rescale ? Vec::fma(Vec::load(place), Vec::load(rescale + j * N), sum[r][j]) : sum[r][j]);
    }
}

template <class E, int V>
void accumulate_part(const typename E::scalar* values, int64_t stride, int64_t count, const typename E::packed* weights,
                     int64_t lanes, const float* rescale, int64_t width, float* out) {
  constexpr int R = kRowsBy<V>;
  int64_t r = 0;
  for (; r + R <= width; r += R)
    accumulate_rows<E, R, V>(values + r * E::step, stride, count, weights, lanes, rescale, out + r * lanes);
  for (; R > 4 && r + 4 <= width; r += 4)
    accumulate_rows<E, 4, V>(values + r * E::step, stride, count, weights, lanes, rescale, out + r * lanes);
  for (; r + 2 <= width; r += 2)
    accumulate_rows<E, 2, V>(values + r * E::step, stride, count, weights, lanes, rescale, out + r * lanes);
  if (r < width)
    accumulate_rows<E, 1, V>(values + r * E::step, stride, count, weights, lanes, rescale, out + r * lanes);
}

// Calls act(V), where V is the number of vectors, at most W, as a compile-time constant.
template <int W, class Act>
inline void with_vectors(int vectors, Act act) {
  if constexpr (W > 1)
    if (vectors < W) return with_vectors<W - 1>(vectors, act);
  act(std::integral_constant<int, W>());
}

// accumulate_part with the same bits where some blocked value is not finite: 0 * NaN would reach rows that may not
// read it. The first of the vectors is number `begin` of those in `allowed`.
void accumulate_selected_part(const float* values, int64_t stride, int64_t count, const float* weights, int64_t lanes,
                              int vectors, const uint64_t* allowed, int begin, const float* rescale, int64_t width,
                              float* out) {
  for (int64_t r = 0; r < width; ++r)
    for (int j = 0; j < vectors; ++j) {
      f sum = Vec::zero();
      for (int64_t s = 0; s < count; ++s) {
        const f next = Vec::fma(Vec::set1(values[s * stride + r]), Vec::load(weights + s * lanes + j * N), sum);
        sum = Vec::select(allowed[s] >> ((begin + j) * N), next, sum);
      }
      float* place = out + r * lanes + j * N;
      Vec::store(place, Vec::fma(Vec::load(place), Vec::load(rescale + j * N), sum));
    }
}

template <int W>
void accumulate_selected(const float* values, int64_t stride, int64_t count, const float* weights,
                         const uint64_t* allowed, const float* rescale, int64_t width, float* out) {
  accumulate_selected_part(values, stride, count, weights, W * N, W, allowed, 0, rescale, width, out);
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
