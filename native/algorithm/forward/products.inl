// The scores of a block of queries for a tile of keys. After parts.inl and prefetch.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// Whether K and V are read as pairs of bf16 numbers
bool uses_pairs(const Forward& call) { return Vec::has_dots && call.type == Type::bf16 && call.head_dim % 2 == 0; }

template <int W>
struct Products {
  static constexpr int lanes = W * N;
  const Forward& call;
  const Queries& queries;
  const bool pairs;
  float* packed;           // the queries, [feature][lane]
  uint32_t* packed_pairs;  // or [pair of features][lane]
  float* convert;          // rows that are converted to fp32, lent to whatever needs some

  Products(const Queries& queries, Arena& arena)
      : call(queries.call),
        queries(queries),
        pairs(uses_pairs(call)),
        packed(arena.take<float>(max(call.head_dim, call.value_dim) * lanes)),
        packed_pairs(arena.take<uint32_t>(pairs ? call.head_dim / 2 * lanes : 0)),
        convert(arena.take<float>(kTile * max(call.head_dim, call.value_dim))) {}

  // Raw scores have the sign of the scale, so that the largest one has the largest weight.
  void load_queries() {
    const float sign = keeps_raw_scores(call) && call.scale < 0 ? -1.f : 1.f;
    if (pairs)
      pack_pairs(call.q, call.type, queries.batch, queries.head, queries.first, queries.count, lanes, call.head_dim,
                 sign, convert, packed_pairs);
    else
      pack_floats(call.q, call.type, queries.batch, queries.head, queries.first, queries.count, lanes, call.head_dim,
                  sign, convert, packed);
  }

  // tile[source][lane] = the final score, in the parts
  void compute(float* tile, int64_t from, int64_t n, Tile kind, const TileParts<W>& parts, Prefetcher& prefetcher) {
    multiply(tile, from, n, parts, prefetcher);
    const bool masked = kind == Tile::partial;
    if (!parts.raw) finish_scores<W>(call, tile, n, parts.bias, masked ? parts.bits : nullptr, nullptr);
    else if (masked) parts.mask_scores(tile, from, n);
  }

  Rows rows_of(const View& view, int64_t from, int64_t n, int64_t width) {
    return float_rows(view, call.type, queries.batch, queries.source_head, from, n, width, convert);
  }

 private:
  void multiply(float* tile, int64_t from, int64_t n, const TileParts<W>& parts, Prefetcher& prefetcher) {
#ifdef CLEARHEAD_DOTS
    if (pairs) {
      const auto* k = (const uint16_t*)at(call.k, call.type, queries.batch, queries.source_head, from);
      return multiply_parts<Pair>(k, call.k.position, packed_pairs, call.head_dim / 2, tile, parts, prefetcher);
    }
#endif
    const Rows k = rows_of(call.k, from, n, call.head_dim);
    multiply_parts<Single>(k.data, k.stride, packed, call.head_dim, tile, parts, prefetcher);
  }

  template <class E>
  void multiply_parts(const typename E::scalar* rows, int64_t stride, const typename E::packed* packed, int64_t depth,
                      float* tile, const TileParts<W>& parts, Prefetcher& prefetcher) {
    parts.each([&](auto vectors, const Part& part) {
      const int64_t lane = part.begin * N;
      in_chunks<vectors>(part.first, part.last, prefetcher, [&](int64_t first, int64_t last) {
        dot_part<E, vectors>(rows + first * stride, stride, last - first, packed + lane, lanes, depth,
                             tile + first * lanes + lane);
      });
    });
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
