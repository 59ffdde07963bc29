// The gradients of the sources of one work item. After outer.inl.
namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

void write_row(const View& view, Type type, int64_t batch, int64_t head, int64_t position, const float* row,
               int64_t width) {
  auto* to = (char*)at(view, type, batch, head, position);
  if (type == Type::f32) std::memcpy(to, row, sizeof(float) * width);
  else to_halves(row, width, type, (uint16_t*)to);
}

// The sources of a work item, every `slots`-th tile of one source head, and the sums of their dK and dV.
struct SourceGrads {
  const Backward& work;
  const Forward& call;
  int64_t slot, batch = 0, source_head = 0, key_width, value_width, size;
  float *own_dk, *own_dv, *dk, *dv, *rows;
  bool finite_keys = true, in_place = false;

  SourceGrads(const Backward& work, int64_t slot, Arena& arena) : work(work), call(work.forward), slot(slot) {
    const int64_t tiles = (call.source + kTile - 1) / kTile;
    key_width = padded(call.head_dim), value_width = padded(call.value_dim);
    size = (tiles + work.slots - 1) / work.slots * kTile;
    own_dk = arena.take<float>(size * key_width), own_dv = arena.take<float>(size * value_width);
    rows = arena.take<float>(kTile * call.head_dim);
  }

  // The row of a source in dk and dv
  int64_t place(int64_t source) const { return source / kTile / work.slots * kTile + source % kTile; }

  // Calls handle(first source, number of sources) for each tile.
  template <class Do>
  void each_tile(Do handle) {
    for (int64_t from = slot * kTile; from < call.source; from += kTile * work.slots)
      handle(from, min(kTile, call.source - from));
  }

  // Contiguous rows of whole vectors in fp32 are summed in place.
  bool is_in_place(const View& to, int64_t width) const {
    return work.slots == 1 && work.type == Type::f32 && width % N == 0 && to.position == width;
  }

  void start() {
    in_place = is_in_place(work.dk, call.head_dim) && is_in_place(work.dv, call.value_dim);
    dk = in_place ? (float*)at(work.dk, work.type, batch, source_head, 0) : own_dk;
    dv = in_place ? (float*)at(work.dv, work.type, batch, source_head, 0) : own_dv;
    const int64_t rows_all = in_place ? call.source : size;
    std::memset(dk, 0, sizeof(float) * rows_all * key_width);
    std::memset(dv, 0, sizeof(float) * rows_all * value_width);
    finite_keys = true;
    if (!call.mask.start && !call.mask.bytes && !call.bias.data) return;  // nothing is blocked
    each_tile([&](int64_t from, int64_t n) {
      const Rows keys = float_rows(call.k, call.type, batch, source_head, from, n, call.head_dim, rows);
      finite_keys = finite_keys && all_finite(keys, n, call.head_dim);
    });
  }

  void finish() {
    if (in_place) return;
    each_tile([&](int64_t from, int64_t n) {
      const float *k = dk + place(from) * key_width, *v = dv + place(from) * value_width;
      for (int64_t s = 0; s < n; ++s) {
        write_row(work.dk, work.type, batch, source_head, from + s, k + s * key_width, call.head_dim);
        write_row(work.dv, work.type, batch, source_head, from + s, v + s * value_width, call.value_dim);
      }
    });
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
