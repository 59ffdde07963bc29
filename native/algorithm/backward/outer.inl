// Outer products, for the gradients of the sources. After load.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// to[r][.] += sum_q weights[r][q] * rows[q][.], for R sources and V vectors of features
template <class E, int R, int V>
inline void outer_rows(const typename E::scalar* weights, int64_t weight_stride, const typename E::packed* rows,
                       int64_t row_stride, int64_t count, float* to, int64_t to_stride) {
  f sum[R][V];
  CLEARHEAD_UNROLL_FOR (int r = 0; r < R; ++r)
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) sum[r][j] = Vec::zero();
  for (int64_t q = 0; q < count; ++q) {
    typename E::vec row[V];
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) row[j] = E::load(rows + q * row_stride + j * N);
    CLEARHEAD_UNROLL_FOR (int r = 0; r < R; ++r) {
      const typename E::vec x = E::broadcast(weights + r * weight_stride + q * E::step);
      CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) sum[r][j] = E::mac(x, row[j], sum[r][j]);
    }
  }
  CLEARHEAD_UNROLL_FOR (int r = 0; r < R; ++r)
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) {
      float* place = to + r * to_stride + j * N;
      Vec::store(place, Vec::add(Vec::load(place), sum[r][j]));
    }
}

template <class E, int V>
void outer_columns(const typename E::scalar* weights, int64_t weight_stride, int64_t sources,
                   const typename E::packed* rows, int64_t row_stride, int64_t count, float* to, int64_t to_stride) {
  int64_t s = 0;
  for (; s + 6 <= sources; s += 6)
    outer_rows<E, 6, V>(weights + s * weight_stride, weight_stride, rows, row_stride, count, to + s * to_stride,
                        to_stride);
  for (; s + 2 <= sources; s += 2)
    outer_rows<E, 2, V>(weights + s * weight_stride, weight_stride, rows, row_stride, count, to + s * to_stride,
                        to_stride);
  if (s < sources)
    outer_rows<E, 1, V>(weights + s * weight_stride, weight_stride, rows, row_stride, count, to + s * to_stride,
                        to_stride);
}

// `width` is a multiple of the lanes
template <class E>
void outer_tile(const typename E::scalar* weights, int64_t weight_stride, int64_t sources,
                const typename E::packed* rows, int64_t row_stride, int64_t count, int64_t width, float* to) {
  int64_t i = 0;
  for (; i + Vec::outer * N <= width; i += Vec::outer * N)
    outer_columns<E, Vec::outer>(weights, weight_stride, sources, rows + i, row_stride, count, to + i, width);
  for (; i + 2 * N <= width; i += 2 * N)
    outer_columns<E, 2>(weights, weight_stride, sources, rows + i, row_stride, count, to + i, width);
  for (; i < width; i += N)
    outer_columns<E, 1>(weights, weight_stride, sources, rows + i, row_stride, count, to + i, width);
}

// The same where a row is not finite, which must not reach sources that it gives no weight.
void outer_selected(const float* weights, int64_t weight_stride, int64_t sources, const float* rows, int64_t row_stride,
                    int64_t count, int64_t width, float* to) {
  for (int64_t s = 0; s < sources; ++s)
    for (int64_t q = 0; q < count; ++q) {
      const float weight = weights[s * weight_stride + q];
      if (weight == 0) continue;
      for (int64_t i = 0; i < width; ++i) to[s * width + i] += weight * rows[q * row_stride + i];
    }
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
