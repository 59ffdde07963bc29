// Gradients: weights and their gradients are computed again tile by tile from each row's maximum and sum, so
// that nothing of size query x source is kept. A work item owns some tiles of sources of one source
// head (their rows of dK and dV are its own), and adds its share of dQ to a slot of its own.
// After forward.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

inline int64_t padded(int64_t width) { return (width + N - 1) / N * N; }

// to[r][.] += sum_q weights[r][q] * rows[q][.], for R sources and V vectors of features
template <class E, int R, int V>
inline void outer_rows(const typename E::scalar* weights, int64_t weight_stride, const typename E::packed* rows,
                       int64_t row_stride, int64_t count, float* to, int64_t to_stride) {
  f sum[R][V];
  CLEARHEAD_UNROLL for (int r = 0; r < R; ++r)
    CLEARHEAD_UNROLL for (int j = 0; j < V; ++j) sum[r][j] = Vec::zero();
  for (int64_t q = 0; q < count; ++q) {
    typename E::vec row[V];
    CLEARHEAD_UNROLL for (int j = 0; j < V; ++j) row[j] = E::load(rows + q * row_stride + j * N);
    CLEARHEAD_UNROLL for (int r = 0; r < R; ++r) {
      const typename E::vec x = E::broadcast(weights + r * weight_stride + q * E::step);
      CLEARHEAD_UNROLL for (int j = 0; j < V; ++j) sum[r][j] = E::mac(x, row[j], sum[r][j]);
    }
  }
  CLEARHEAD_UNROLL for (int r = 0; r < R; ++r)
    CLEARHEAD_UNROLL for (int j = 0; j < V; ++j) {
      float* place = to + r * to_stride + j * N;
      Vec::store(place, Vec::add(Vec::load(place), sum[r][j]));
    }
}

template <class E, int V>
void outer_columns(const typename E::scalar* weights, int64_t weight_stride, int64_t sources,
                   const typename E::packed* rows, int64_t row_stride, int64_t count, float* to, int64_t to_stride) {
  int64_t s = 0;
  for (; s + 6 <= sources; s += 6)
    outer_rows<E, 6, V>(weights + s * weight_stride, weight_stride, rows, row_stride, count, to + s * to_stride, to_stride);
  for (; s + 2 <= sources; s += 2)
    outer_rows<E, 2, V>(weights + s * weight_stride, weight_stride, rows, row_stride, count, to + s * to_stride, to_stride);
  if (s < sources)
    outer_rows<E, 1, V>(weights + s * weight_stride, weight_stride, rows, row_stride, count, to + s * to_stride, to_stride);
}

// `width` is a multiple of the lanes
template <class E>
void outer_tile(const typename E::scalar* weights, int64_t weight_stride, int64_t sources,
                const typename E::packed* rows, int64_t count, int64_t width, float* to) {
  int64_t i = 0;
  for (; i + Vec::outer * N <= width; i += Vec::outer * N)
    outer_columns<E, Vec::outer>(weights, weight_stride, sources, rows + i, width, count, to + i, width);
  for (; i < width; i += N)
    outer_columns<E, 1>(weights, weight_stride, sources, rows + i, width, count, to + i, width);
}

// The same where a row is not finite: it must not reach sources that it gives no weight.
void outer_selected(const float* weights, int64_t weight_stride, int64_t sources, const float* rows, int64_t count,
                    int64_t width, float* to) {
  for (int64_t s = 0; s < sources; ++s)
    for (int64_t q = 0; q < count; ++q) {
      const float weight = weights[s * weight_stride + q];
      if (weight == 0) continue;
      for (int64_t i = 0; i < width; ++i) to[s * width + i] += weight * rows[q * width + i];
    }
}

struct Gradient {
  static constexpr int W = Vec::vectors;
  static constexpr int lanes = W * N;
  const Backward& work;
  const Forward& call;
  int64_t batch, source_head, slot, head, first, count;
  int64_t key_width, value_width;
  float *packed_q, *packed_grad, *rows_q, *rows_grad, *scores, *grads, *slope, *bias_tile, *dq, *row_max, *row_scale, *delta, *ones;
  float *convert_k, *convert_v;
  bool plain, odd, pairs;
  uint32_t *pairs_q, *pairs_grad, *row_pairs_q, *row_pairs_grad, *grad_pairs;
  uint16_t *short_weights, *short_grads;
  Ranges ranges;
  uint64_t bits[kTile];

  Gradient(const Backward& work, Arena& arena) : work(work), call(work.forward) {
    plain = is_plain(call);
    key_width = padded(call.head_dim), value_width = padded(call.value_dim);
    packed_q = arena.take<float>(call.head_dim * lanes), packed_grad = arena.take<float>(call.value_dim * lanes);
    rows_q = arena.take<float>(key_width * lanes), rows_grad = arena.take<float>(value_width * lanes);
    scores = arena.take<float>(kTile * lanes), grads = arena.take<float>(kTile * lanes);
    slope = arena.take<float>(call.softcap != 0 ? kTile * lanes : 0);
    bias_tile = arena.take<float>(call.bias.data ? kTile * lanes : 0);
    dq = arena.take<float>(call.head_dim * lanes);
    row_max = arena.take<float>(lanes), row_scale = arena.take<float>(lanes);
    delta = arena.take<float>(lanes), ones = arena.take<float>(lanes);
    pairs = work.packed_k != nullptr;
    pairs_q = arena.take<uint32_t>(pairs ? call.head_dim / 2 * lanes : 0);
    pairs_grad = arena.take<uint32_t>(pairs ? call.value_dim / 2 * lanes : 0);
    row_pairs_q = arena.take<uint32_t>(pairs ? key_width * lanes / 2 : 0);
    row_pairs_grad = arena.take<uint32_t>(pairs ? value_width * lanes / 2 : 0);
    grad_pairs = arena.take<uint32_t>(pairs ? kTile / 2 * lanes : 0);
    short_weights = arena.take<uint16_t>(pairs ? kTile * lanes : 0);
    short_grads = arena.take<uint16_t>(pairs ? kTile * lanes : 0);
    convert_k = arena.take<float>(kTile * call.head_dim), convert_v = arena.take<float>(kTile * call.value_dim);
  }

  // rows[lane][i], zero-padded to `padded_width` features, and packed[i][lane] of the same
  void load_rows(const View& view, int64_t width, int64_t padded_width, float* rows, float* packed) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      float* row = rows + lane * padded_width;
      for (int64_t i = width; i < padded_width; ++i) row[i] = 0;
      if (lane >= count) {
        std::memset(row, 0, sizeof(float) * width);
      } else {
        const char* from = at(view, call.type, batch, head, first + lane);
        if (call.type == Type::f32) std::memcpy(row, from, sizeof(float) * width);
        else to_float((const uint16_t*)from, width, call.type, row);
      }
    }
    if (!pairs) transpose(rows, padded_width, lanes, width, packed, lanes);
  }

  // The rows of bf16 numbers as pairs of features, by lane, and as pairs of queries, by feature.
  void pair_rows(const float* rows, int64_t width, int64_t padded_width, uint32_t* by_feature, uint32_t* by_query) {
    const auto* bits = (const uint32_t*)rows;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const uint32_t* row = bits + lane * padded_width;
      for (int64_t i = 0; i < width / 2; ++i)
        by_feature[i * lanes + lane] = row[2 * i] >> 16 | (row[2 * i + 1] & 0xffff0000);
    }
    for (int64_t q = 0; q < lanes / 2; ++q) {
      const uint32_t *low = bits + 2 * q * padded_width, *high = low + padded_width;
      for (int64_t i = 0; i < padded_width; ++i) by_query[q * padded_width + i] = low[i] >> 16 | (high[i] & 0xffff0000);
    }
  }

  void load_block() {
    load_rows(call.q, call.head_dim, key_width, rows_q, packed_q);
    load_rows(work.grad_out, call.value_dim, value_width, rows_grad, packed_grad);
    if (pairs) {
      pair_rows(rows_q, call.head_dim, key_width, pairs_q, row_pairs_q);
      pair_rows(rows_grad, call.value_dim, value_width, pairs_grad, row_pairs_grad);
    }
    odd = !all_finite<W>({rows_q, key_width}, lanes, key_width) || !all_finite<W>({rows_grad, value_width}, lanes, value_width);
    std::memset(dq, 0, sizeof(float) * call.head_dim * lanes);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t row = (batch * call.head + head) * call.query_total + call.first_query + first + lane;
      ones[lane] = 1;
      row_max[lane] = lane < count ? call.row_max[row] : 0;
      row_scale[lane] = lane < count ? call.row_scale[row] : 0;
      delta[lane] = lane < count ? call.scale * (dot_with_out(lane) - (work.grad_lse ? work.grad_lse[row] : 0)) : 0;
    }
  }

  float dot_with_out(int64_t lane) {
    const char* from = at(call.out, call.type, batch, head, first + lane);
    const float* out = (const float*)from;
    if (call.type != Type::f32) to_float((const uint16_t*)from, call.value_dim, call.type, convert_v), out = convert_v;
    const float* grad = rows_grad + lane * value_width;
    f sum = Vec::zero();
    int64_t i = 0;
    for (; i + N <= call.value_dim; i += N) sum = Vec::fma(Vec::load(out + i), Vec::load(grad + i), sum);
    float result = Vec::sum(sum);
    for (; i < call.value_dim; ++i) result += out[i] * grad[i];
    return result;
  }

  Tile allow(int64_t from, int64_t n) {
    const Tile kind = tile_bits<W>(call.mask, ranges, batch, head, first, count, from, n, bits);
    if (!call.bias.data || kind == Tile::empty) return kind;
    load_bias<W>(call.bias, batch, head, first, count, from, n, bias_tile);
    return block_by_bias<W>(bias_tile, n, kind, bits);
  }

  // scores -> weights; grads, the gradient of the weights -> the gradient of q.k; delta has the scale
  void differentiate(int64_t n, bool masked) {
    const f scale = Vec::set1(plain ? call.scale : 1.f);
    for (int64_t i = 0; i < n * W; ++i) {
      const int j = (int)(i % W) * N;
      const f below = Vec::fms(Vec::load(scores + i * N), scale, Vec::load(row_max + j));
      f weight = Vec::mul(exp_of(below), Vec::load(row_scale + j));
      const f change = Vec::fms(Vec::load(grads + i * N), Vec::set1(call.scale), Vec::load(delta + j));
      f grad = Vec::mul(weight, change);
      if (call.softcap != 0) grad = Vec::mul(grad, Vec::load(slope + i * N));
      if (masked) {
        weight = Vec::select(bits[i / W] >> j, weight, Vec::zero());
        grad = Vec::select(bits[i / W] >> j, grad, Vec::zero());
      }
      Vec::store(scores + i * N, weight), Vec::store(grads + i * N, grad);
    }
  }

  void tile(int64_t from, int64_t n, Tile kind) {
    const bool masked = kind == Tile::partial;
    dot_sources(call.k, call.head_dim, packed_q, pairs_q, convert_k, from, n, scores);
    if (!plain || masked) edit<W>(call, scores, n, bias_tile, masked ? bits : nullptr, call.softcap != 0 ? slope : nullptr);
    dot_sources(call.v, call.value_dim, packed_grad, pairs_grad, convert_v, from, n, grads);
    differentiate(n, masked);
    if (pairs) round_tile(n);
    add_to_dq(from, n, masked);
    const int64_t row = (batch * call.source_head + source_head) * call.source + from;
    add_to_sources(scores, short_weights, rows_grad, row_pairs_grad, n, value_width, work.dv + row * value_width);
    add_to_sources(grads, short_grads, rows_q, row_pairs_q, n, key_width, work.dk + row * key_width);
  }

  void add_to_dq(int64_t from, int64_t n, bool masked) {
    if (pairs && !masked) return mix_pairs_of(from, n);
    const Rows k = key_rows(from, n);
    const bool selected = masked && !all_finite<W>(k, n, call.head_dim);
    if (pairs && !selected) return mix_pairs_of(from, n);
    if (selected) mix_selected<W>(k.data, k.stride, n, grads, bits, ones, call.head_dim, dq);
    else mix_tile<Single, W>(k.data, k.stride, n, grads, ones, call.head_dim, dq);
  }

  Rows key_rows(int64_t from, int64_t n) {
    return float_rows(call.k, call.type, batch, source_head, from, n, call.head_dim, convert_k);
  }

#ifdef CLEARHEAD_DOTS
  void dot_sources(const View& view, int64_t width, const float* packed, const uint32_t* packed_pairs, float* convert,
                   int64_t from, int64_t n, float* result) {
    if (pairs) {
      const auto* rows = (const uint16_t*)at(view, call.type, batch, source_head, from);
      return dot_tile<Pair, W>(rows, view.position, n, packed_pairs, width / 2, result);
    }
    const Rows rows = float_rows(view, call.type, batch, source_head, from, n, width, convert);
    dot_tile<Single, W>(rows.data, rows.stride, n, packed, width, result);
  }

  // The tile's weights and gradients in bf16, by query; the gradients also as pairs of sources.
  void round_tile(int64_t n) {
    for (int64_t i = 0; i < n * W; ++i) {
      Vec::store_bf16(short_weights + i * N, Vec::load(scores + i * N));
      Vec::store_bf16(short_grads + i * N, Vec::load(grads + i * N));
    }
    for (int64_t s = 0; s < n; s += 2)
      for (int j = 0; j < W; ++j)
        Vec::store_pair(grad_pairs + (s / 2 * W + j) * N, Vec::load(grads + (s * W + j) * N),
                        s + 1 < n ? Vec::load(grads + ((s + 1) * W + j) * N) : Vec::zero());
  }

  void mix_pairs_of(int64_t from, int64_t n) {
    const int64_t row = (batch * call.source_head + source_head) * ((call.source + 1) / 2) + from / 2;
    const auto* k = (const uint16_t*)(work.packed_k + row * call.head_dim);
    mix_tile<Pair, W>(k, 2 * call.head_dim, (n + 1) / 2, grad_pairs, ones, call.head_dim, dq);
  }

  void add_to_sources(const float* weights, const uint16_t* short_form, const float* rows, const uint32_t* row_pairs,
                      int64_t n, int64_t width, float* to) {
    if (odd) return outer_selected(weights, lanes, n, rows, count, width, to);
    if (pairs) return outer_tile<Pair>(short_form, lanes, n, row_pairs, (count + 1) / 2, width, to);
    outer_tile<Single>(weights, lanes, n, rows, count, width, to);
  }
#else
  void dot_sources(const View& view, int64_t width, const float* packed, const uint32_t*, float* convert, int64_t from,
                   int64_t n, float* result) {
    const Rows rows = float_rows(view, call.type, batch, source_head, from, n, width, convert);
    dot_tile<Single, W>(rows.data, rows.stride, n, packed, width, result);
  }
  void round_tile(int64_t) {}
  void mix_pairs_of(int64_t, int64_t) {}
  void add_to_sources(const float* weights, const uint16_t*, const float* rows, const uint32_t*, int64_t n,
                      int64_t width, float* to) {
    if (odd) return outer_selected(weights, lanes, n, rows, count, width, to);
    outer_tile<Single>(weights, lanes, n, rows, count, width, to);
  }
#endif

  void add_dq() {
    const int64_t base = ((slot * call.batch + batch) * call.head + head) * call.query + first;
    transpose(dq, lanes, call.head_dim, count, work.dq + base * call.head_dim, call.head_dim);
  }

  void block() {
    ranges = ranges_of(call.mask, batch, head, first, count, lanes, call.source);
    load_block();
    const int64_t stride = kTile * work.slots;
    int64_t from = slot * kTile;
    if (ranges.first > from) from += (ranges.first - from) / stride * stride;
    for (; from < ranges.last; from += stride) {
      const int64_t n = min(kTile, call.source - from);
      if (from + n <= ranges.first) continue;
      const Tile kind = allow(from, n);
      if (kind != Tile::empty) tile(from, n, kind);
    }
    add_dq();
  }
};

// Work item: every `slots`-th tile of sources of one source head, for all queries that read them.
void backward_item(const Backward& work, int64_t item, char* scratch) {
  Arena arena{scratch};
  Gradient gradient(work, arena);
  const Forward& call = work.forward;
  const int64_t row = item / work.slots, group = call.head / call.source_head;
  gradient.slot = item % work.slots;
  gradient.batch = row / call.source_head, gradient.source_head = row % call.source_head;
  for (int64_t h = 0; h < group; ++h)
    for (int64_t first = 0; first < call.query; first += kMaxLanes) {
      gradient.head = gradient.source_head * group + h;
      gradient.first = first, gradient.count = min(kMaxLanes, call.query - first);
      gradient.block();
    }
}

size_t backward_scratch(const Backward& work) {
  Arena arena{nullptr};
  Gradient gradient(work, arena);
  return arena.used + 64;
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
