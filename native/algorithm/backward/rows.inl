// The rows of a block of queries as the backward needs them. After load.inl and scores.inl.
namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// The rows of a block as fp32 in whole vectors: in place, or a copy padded with zeros.
struct PaddedRows {
  float* own;
  const float* data;
  int64_t stride;

  void load(const View& view, const Queries& queries, int64_t lanes, int64_t width) {
    const Type type = queries.call.type;
    if (type == Type::f32 && width % N == 0) {
      data = (const float*)at(view, type, queries.batch, queries.head, queries.first), stride = view.position;
      return;
    }
    data = own, stride = padded(width);
    std::memset(own, 0, sizeof(float) * stride * lanes);
    for (int64_t lane = 0; lane < queries.count; ++lane) {
      const char* from = at(view, type, queries.batch, queries.head, queries.first + lane);
      if (type == Type::f32) std::memcpy(own + lane * stride, from, sizeof(float) * width);
      else to_float((const uint16_t*)from, width, type, own + lane * stride);
    }
  }
};

// Rows of bf16 numbers as pairs of features, [pair][lane], and as pairs of queries, [pair][feature].
struct PairedRows {
  uint16_t* rows;
  uint32_t *by_feature, *by_query;

  void take(Arena& arena, int64_t lanes, int64_t width, bool used) {
    const int64_t size = used ? lanes * padded(width) : 0;
    rows = arena.take<uint16_t>(size);
    by_feature = arena.take<uint32_t>(size / 2), by_query = arena.take<uint32_t>(size / 2);
  }

  // Returns whether all numbers are finite.
  bool load(const View& view, const Queries& queries, int64_t lanes, int64_t width) {
    const int64_t wide = padded(width);
    std::memset(rows, 0, sizeof(uint16_t) * lanes * wide);
    for (int64_t lane = 0; lane < queries.count; ++lane) {
      const char* from = at(view, Type::bf16, queries.batch, queries.head, queries.first + lane);
      std::memcpy(rows + lane * wide, from, sizeof(uint16_t) * width);
    }
    transpose((const float*)rows, wide / 2, lanes, width / 2, (float*)by_feature, lanes);  // only moves bits
    for (int64_t q = 0; q < lanes / 2; ++q) {
      const uint16_t *low = rows + 2 * q * wide, *high = low + wide;
      for (int64_t i = 0; i < wide; ++i) by_query[q * wide + i] = low[i] | (uint32_t)high[i] << 16;
    }
    uint32_t bad = 0;
    for (int64_t i = 0; i < lanes * wide; ++i) bad |= (rows[i] & 0x7f80) == 0x7f80;
    return !bad;
  }
};

// One of the operands of a block, q or the gradient of the context, in the layouts that the products need.
template <int W>
struct Operand {
  static constexpr int lanes = W * N;
  const View& view;
  const int64_t width;
  const bool pairs;
  float* packed;      // [feature][lane]
  PaddedRows rows;    // [lane][feature]
  PairedRows paired;  // both for bf16 products

  Operand(const View& view, int64_t width, bool pairs, Arena& arena) : view(view), width(width), pairs(pairs) {
    packed = arena.take<float>(width * lanes);
    rows.own = arena.take<float>(padded(width) * lanes);
    paired.take(arena, lanes, width, pairs);
  }

  // Returns whether all numbers are finite; with pairs `rows` is not loaded if they are.
  bool load(const Queries& queries) {
    if (pairs && paired.load(view, queries, lanes, width)) return true;
    load_rows(queries);
    if (pairs) return false;
    transpose(rows.data, rows.stride, queries.count, width, packed, lanes);
    for (int64_t i = 0; i < width && queries.count < lanes; ++i)
      for (int64_t lane = queries.count; lane < lanes; ++lane) packed[i * lanes + lane] = 0;
    return all_finite({rows.data, rows.stride}, queries.count, width);
  }

  void load_rows(const Queries& queries) { rows.load(view, queries, lanes, width); }

  // Flips the signs of what is packed by lane.
  void negate() {
    for (int64_t i = 0; !pairs && i < width * lanes; ++i) packed[i] = -packed[i];
    for (int64_t i = 0; pairs && i < width / 2 * lanes; ++i) paired.by_feature[i] ^= 0x80008000;
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
