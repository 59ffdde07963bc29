// Outer products, for gradients of sources, and the rows of a block as they need them. After load.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

inline int64_t padded(int64_t width) { return (width + N - 1) / N * N; }

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

// The same where a row is not finite: it must not reach sources that it gives no weight.
void outer_selected(const float* weights, int64_t weight_stride, int64_t sources, const float* rows, int64_t row_stride,
                    int64_t count, int64_t width, float* to) {
  for (int64_t s = 0; s < sources; ++s)
    for (int64_t q = 0; q < count; ++q) {
      const float weight = weights[s * weight_stride + q];
      if (weight == 0) continue;
      for (int64_t i = 0; i < width; ++i) to[s * width + i] += weight * rows[q * row_stride + i];
    }
}

// Rows of a block as fp32 in whole vectors: where they lie, or a copy with zeros behind.
struct Padded {
  float* own;
  const float* data;
  int64_t stride;

  void load(const View& view, Type type, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t lanes,
            int64_t width) {
    if (type == Type::f32 && width % N == 0) {
      data = (const float*)at(view, type, batch, head, first), stride = view.position;
      return;
    }
    data = own, stride = padded(width);
    std::memset(own, 0, sizeof(float) * stride * lanes);
    for (int64_t lane = 0; lane < count; ++lane) {
      const char* from = at(view, type, batch, head, first + lane);
      if (type == Type::f32) std::memcpy(own + lane * stride, from, sizeof(float) * width);
      else to_float((const uint16_t*)from, width, type, own + lane * stride);
    }
  }
};

// Rows of bf16 numbers as pairs of features, by lane, and as pairs of queries, by feature.
struct Paired {
  uint16_t* rows;
  uint32_t *by_feature, *by_query;

  void take(Arena& arena, int64_t lanes, int64_t width, bool used) {
    const int64_t size = used ? lanes * padded(width) : 0;
    rows = arena.take<uint16_t>(size), by_feature = arena.take<uint32_t>(size / 2),
    by_query = arena.take<uint32_t>(size / 2);
  }

  // Says whether all numbers are finite.
  bool load(const View& view, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t lanes, int64_t width) {
    const int64_t wide = padded(width);
    std::memset(rows, 0, sizeof(uint16_t) * lanes * wide);
    for (int64_t lane = 0; lane < count; ++lane)
      std::memcpy(rows + lane * wide, at(view, Type::bf16, batch, head, first + lane), sizeof(uint16_t) * width);
    transpose((const float*)rows, wide / 2, lanes, width / 2, (float*)by_feature, lanes);  // moves bits alone
    for (int64_t q = 0; q < lanes / 2; ++q) {
      const uint16_t *low = rows + 2 * q * wide, *high = low + wide;
      for (int64_t i = 0; i < wide; ++i) by_query[q * wide + i] = low[i] | (uint32_t)high[i] << 16;
    }
    uint32_t bad = 0;
    for (int64_t i = 0; i < lanes * wide; ++i) bad |= (rows[i] & 0x7f80) == 0x7f80;
    return !bad;
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
