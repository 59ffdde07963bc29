// Memory that a block will write, and that the next block will read. After masks.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// Where a block of queries is
struct Place {
  int64_t batch, head, first;
};

// V of one source head from an even source on, in pairs of sources
inline const uint32_t* packed_values(const Forward& call, int64_t batch, int64_t source_head, int64_t from) {
  return call.packed_v +
         ((batch * call.source_head + source_head) * ((call.source + 1) / 2) + from / 2) * call.value_dim;
}

// Rows that are prefetched a few cache lines at a time, between other work: the cache misses, one after the other,
// would take as long as half a tile.
struct Prefetcher {
  bool waits() const { return !pace; }
  bool done() const { return !pace || current == count; }

  // All lines are prefetched within so many steps.
  void start(int64_t steps) { pace = lines / steps + 1; }

  void step() {
    for (due += pace; due > 0 && current < count; due -= all[current].lines, next()) {
      const Rows& rows = all[current];
      const char* from = rows.data + row * rows.stride;
      rows.write ? prefetch_lines<1>(from, 64 * rows.lines) : prefetch_lines<0>(from, 64 * rows.lines);
    }
  }

  // Plans what this block will write, and what the next one reads that this one does not.
  void plan(const Queries& queries, const Ranges& ranges, int64_t lanes, Place after) {
    const Forward& call = queries.call;
    *this = {};
    if (call.out.data)
      add(call, call.out, queries.batch, queries.head, queries.first, queries.first + queries.count, call.value_dim,
          true);
    if (after.first == queries.first && after.head == queries.head && after.batch == queries.batch) return;
    add(call, call.q, after.batch, after.head, after.first, min(after.first + lanes, call.query), call.head_dim, false);
    const int64_t source_head = after.head / (call.head / call.source_head);
    const bool same = after.batch == queries.batch && source_head == queries.source_head;
    if (!ranges.count && !same) add_sources(call, after.batch, source_head, 0, call.source);
    for (int64_t r = 0; r < ranges.count; ++r) {
      const int64_t place = after.batch * call.mask.range_batch + after.head * call.mask.range_head + after.first;
      add_sources(call, after.batch, source_head, call.mask.start[r * call.mask.range_stride + place],
                  same ? ranges.all[r].first : call.source);
    }
  }

 private:
  struct Rows {
    const char* data;
    int64_t stride, count, lines;  // stride in bytes
    bool write;
  };
  static constexpr int kMost = 2 + 2 * kMaxRanges;
  Rows all[kMost];
  int64_t lines = 0, row = 0, pace = 0, due = 0;
  int count = 0, current = 0;

  void next() {
    if (++row == all[current].count) ++current, row = 0;
  }

  void add(const char* data, int64_t stride, int64_t rows, int64_t bytes, bool write) {
    if (rows <= 0) return;
    all[count++] = {data, stride, rows, (bytes + 63) / 64, write};
    lines += rows * ((bytes + 63) / 64);
  }

  void add(const Forward& call, const View& view, int64_t batch, int64_t head, int64_t first, int64_t last,
           int64_t width, bool write) {
    const int64_t size = call.type == Type::f32 ? 4 : 2;
    add(at(view, call.type, batch, head, first), view.position * size, last - first, width * size, write);
  }

  // The first of these sources
  void add_sources(const Forward& call, int64_t batch, int64_t head, int64_t begin, int64_t end) {
    begin = max(0, begin) & ~(int64_t)1, end = min(end, begin + kTile);
    if (begin >= end) return;
    add(call, call.k, batch, head, begin, end, call.head_dim, false);
    if (!call.packed_v) return add(call, call.v, batch, head, begin, end, call.value_dim, false);
    const int64_t bytes = call.value_dim * 4;
    add((const char*)packed_values(call, batch, head, begin), bytes, (end - begin) / 2, bytes, false);
  }
};

// Calls act(first, last) for chunks of [first, last), with prefetches in between while any are left.
template <int V, class Act>
void in_chunks(int64_t first, int64_t last, Prefetcher& prefetcher, Act act) {
  constexpr int64_t chunk = 2 * kRowsBy<V>;
  for (; !prefetcher.done() && last - first > chunk; first += chunk) act(first, first + chunk), prefetcher.step();
  act(first, last), prefetcher.step();
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
