// The context of a block of queries: the weighted sum of the values. After softmax.inl and dropout.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

template <int W>
struct Context {
  static constexpr int lanes = W * N;
  const Forward& call;
  const Queries& queries;
  const bool pairs;
  Kept kept;
  uint32_t* weight_pairs;  // weights of a tile, [pair of sources][lane], where bf16 pairs are used

  Context(const Queries& queries, Arena& arena)
      : call(queries.call),
        queries(queries),
        pairs(uses_pairs(call)),
        kept(call.dropout, lanes, arena),
        weight_pairs(arena.take<uint32_t>(pairs ? kTile / 2 * lanes : 0)),
        kept_weights(arena.take<float>(kept.some_dropped() ? kTile * lanes : 0)),
        sum(arena.take<float>(call.value_dim * lanes)),
        high(arena.take<float>(some_folded() * lanes)),
        low(arena.take<float>(some_folded() * lanes)),
        folded_max(arena.take<float>(lanes)) {}

  void start() {
    kept.start(queries.row(0), call.source, lanes);
    begun = 0, folded = false;
  }

  // Whether the softmax fills `weight_pairs`: weights that may be dropped are packed here.
  bool takes_pairs() const { return pairs && !kept.some_dropped(); }

  // Adds a tile. With `select`, values that are not finite do not reach the rows that may not read them.
  void add(const float* weights, int64_t from, int64_t n, bool select, const float* rescale, const TileParts<W>& parts,
           Products<W>& products, Prefetcher& prefetcher) {
    if (kept.some_dropped()) weights = drop(weights, from, n, parts);
    if (pairs && !select) return add_pairs(from, rescale, parts, prefetcher);
    const Rows v = products.rows_of(call.v, from, n, call.value_dim);
    const bool finite = !select || all_finite(v, n, call.value_dim);
    if (pairs && finite) return add_pairs(from, rescale, parts, prefetcher);
    add_parts<Single>(v.data, v.stride, weights, rescale, finite ? nullptr : parts.bits, parts, prefetcher);
  }

  // Adds the sums so far to the exact ones, which are scaled to the maximum so far, and begins new ones.
  CLEARHEAD_NOINLINE void fold(const Exponent& exponent, const float* row_max) {
    begin(low_bits(W));
    if (folded) add_to_exact(exponent, row_max);
    else begin_folding();
    std::memcpy(folded_max, row_max, sizeof(float) * lanes);
    begun = 0, folded = true;
  }

  // After the last tile; rows that read nothing have a sum of 0.
  void finish(const Exponent& exponent, const float* row_max) {
    begin(low_bits(W));
    if (folded) add_exact(exponent, row_max);
  }

  bool all_finite_sums() const {
    f zeros[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};  // stay 0, or become NaN
    const int64_t count = call.value_dim * W;
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
      CLEARHEAD_UNROLL_FOR (int k = 0; k < 4; ++k)
        zeros[k] = Vec::fma(Vec::load(sum + (i + k) * N), Vec::zero(), zeros[k]);
    for (; i < count; ++i) zeros[0] = Vec::fma(Vec::load(sum + i * N), Vec::zero(), zeros[0]);
    return !Vec::not_finite(Vec::add(Vec::add(zeros[0], zeros[1]), Vec::add(zeros[2], zeros[3])));
  }

  // Writes the normalized context; `scratch` has room for it, [query][feature].
  void write(const OnlineSoftmax<W>& softmax, float* scratch) {
    alignas(64) float factor[lanes];
    for (int lane = 0; lane < lanes; ++lane) factor[lane] = softmax.rescale[lane] * kept.scale();
    auto scaled = [this, &factor](int64_t i, int64_t lane) {
      return Vec::mul(Vec::load(sum + i * lanes + lane), Vec::load(factor + lane));
    };
    const int64_t stride = call.out.position;
    char* to = (char*)row_at(0);
    const bool whole = queries.count % N == 0;
    if (whole && call.type == Type::f32 && call.value_dim % N == 0)
      transpose_whole(call.value_dim, queries.count, scaled, (float*)to, stride);
#ifdef CLEARHEAD_DOTS
    else if (whole && call.type == Type::bf16 && call.value_dim % (2 * N) == 0 && stride % 2 == 0)
      transpose_whole(
          call.value_dim / 2, queries.count,
          [=](int64_t i, int64_t lane) { return Vec::pair_of(scaled(2 * i, lane), scaled(2 * i + 1, lane)); },
          (float*)to, stride / 2);
#endif
    else write_rows(scaled, scratch);
    const int64_t size = call.type == Type::f32 ? 4 : 2;
    for (int64_t lane = 0; lane < queries.count; ++lane)
      if (softmax.row_sum[lane] == 0) std::memset(to + lane * stride * size, 0, size * call.value_dim);
  }

 private:
  float* kept_weights;             // weights of a tile that dropout keeps, 0 for the others
  float* sum;                      // [feature][lane], not normalized
  float *high, *low, *folded_max;  // the sums of earlier tiles, and the maximum that they refer to
  bool folded = false;
  uint32_t begun;  // one bit a vector: its sum has begun

  const char* row_at(int64_t lane) const {
    return at(call.out, call.type, queries.batch, queries.head, queries.first + lane);
  }

  // The features of the exact sums, which only calls of many tiles need
  int64_t some_folded() const { return call.source > kFoldTiles * kTile - 8 ? call.value_dim : 0; }

  void begin_folding() {
    std::memcpy(high, sum, sizeof(float) * call.value_dim * lanes);
    std::memset(low, 0, sizeof(float) * call.value_dim * lanes);
  }

  void find_shrink(const Exponent& exponent, const float* row_max, float* shrink) const {
    for (int at = 0; at < lanes; at += N)
      Vec::store(shrink + at, exponent.exp(Vec::sub(Vec::load(folded_max + at), Vec::load(row_max + at))));
  }

  void add_to_exact(const Exponent& exponent, const float* row_max) {
    alignas(64) float shrink[lanes];
    find_shrink(exponent, row_max, shrink);
    for (int64_t i = 0; i < call.value_dim * W; ++i) {
      const f factor = Vec::load(shrink + i % W * N);
      Vec::store(high + i * N, Vec::mul(Vec::load(high + i * N), factor));
      Vec::store(low + i * N, Vec::mul(Vec::load(low + i * N), factor));
      add_exactly(high + i * N, low + i * N, Vec::load(sum + i * N));
    }
  }

  CLEARHEAD_NOINLINE void add_exact(const Exponent& exponent, const float* row_max) {
    alignas(64) float shrink[lanes];
    find_shrink(exponent, row_max, shrink);
    for (int64_t i = 0; i < call.value_dim * W; ++i) {
      const f factor = Vec::load(shrink + i % W * N);
      const f rest = Vec::fma(Vec::load(low + i * N), factor, Vec::load(sum + i * N));
      Vec::store(sum + i * N, Vec::fma(Vec::load(high + i * N), factor, rest));
    }
  }

  // Readings show the weights before dropout, the context sums those that are kept; `write` scales them.
  const float* drop(const float* weights, int64_t from, int64_t n, const TileParts<W>& parts) {
    parts.each_vector([&](int64_t s, int j) {
      const int64_t place = (s * W + j) * N;
      const uint64_t stays = kept.bits(j * N, from + s);
      Vec::store(kept_weights + place, Vec::select(stays, Vec::load(weights + place), Vec::zero()));
    });
    if (pairs) pack_weights(n, parts);
    return kept_weights;
  }

  // Each vector's sum begins or is rescaled with the first part that adds to it.
  template <class E>
  void add_parts(const typename E::scalar* values, int64_t stride, const typename E::packed* weights,
                 const float* rescale, const uint64_t* allowed, const TileParts<W>& parts, Prefetcher& prefetcher) {
    alignas(64) float factor[lanes];
    std::memcpy(factor, rescale, sizeof factor);
    parts.each([&](auto vectors, const Part& part) {
      const int64_t first = part.first / E::step, last = (part.last + E::step - 1) / E::step, lane = part.begin * N;
      const uint32_t mine = low_bits(part.end) & ~low_bits(part.begin);
      const bool fresh = !allowed && !(begun & mine);
      if (!fresh) begin(mine);
      begun |= mine;
      if constexpr (E::step == 1)
        if (allowed)
          accumulate_selected_part(values + first * stride, stride, last - first, weights + first * lanes + lane, lanes,
                                   vectors, allowed + first, part.begin, factor + lane, call.value_dim, sum + lane);
      if (!allowed)
        in_chunks<vectors>(0, call.value_dim, prefetcher, [&](int64_t begin, int64_t end) {
          accumulate_part<E, vectors>(values + first * stride + begin * E::step, stride, last - first,
                                      weights + first * lanes + lane, lanes, fresh ? nullptr : factor + lane,
                                      end - begin, sum + begin * lanes + lane);
        });
      for (int64_t i = lane; i < part.end * N; ++i) factor[i] = 1;
    });
  }

  // Sets the sums of those of these vectors to 0 that have not begun.
  void begin(uint32_t vectors) {
    for (uint32_t rest = vectors & ~begun; rest; rest &= rest - 1)
      for (int64_t i = 0; i < call.value_dim; ++i) Vec::store(sum + (i * W + lowest_bit(rest)) * N, Vec::zero());
    begun |= vectors;
  }

#ifdef CLEARHEAD_DOTS
  void pack_weights(int64_t n, const TileParts<W>& parts) {
    auto pack = [&](int64_t s, int j) {
      const float* low = kept_weights + (s * W + j) * N;
      const f high = s + 1 < n ? Vec::load(low + lanes) : Vec::zero();
      Vec::store_pair(weight_pairs + (s / 2 * W + j) * N, Vec::load(low), high);
    };
    parts.each_vector(pack, 2);
  }

  void add_pairs(int64_t from, const float* rescale, const TileParts<W>& parts, Prefetcher& prefetcher) {
    const auto* values = (const uint16_t*)packed_values(call, queries.batch, queries.source_head, from);
    add_parts<Pair>(values, 2 * call.value_dim, weight_pairs, rescale, nullptr, parts, prefetcher);
  }
#else
  void pack_weights(int64_t, const TileParts<W>&) {}
  void add_pairs(int64_t, const float*, const TileParts<W>&, Prefetcher&) {}
#endif

  template <class Scaled>
  void write_rows(Scaled scaled, float* scratch) {
    for (int64_t i = 0; i < call.value_dim; ++i)
      for (int lane = 0; lane < lanes; lane += N) Vec::store(sum + i * lanes + lane, scaled(i, lane));
    const bool direct = call.type == Type::f32;
    float* rows = direct ? (float*)row_at(0) : scratch;
    const int64_t stride = direct ? call.out.position : call.value_dim;
    transpose(sum, lanes, call.value_dim, queries.count, rows, stride);
    for (int64_t lane = 0; lane < queries.count && !direct; ++lane)
      to_halves(rows + lane * stride, call.value_dim, call.type, (uint16_t*)row_at(lane));
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
