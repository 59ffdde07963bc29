// The forward: blocks of queries against their tiles of sources, and what is read on the way. After products.inl,
// softmax.inl, top.inl, context.inl and strip.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

template <int W>
struct Block {
  static constexpr int lanes = W * N;
  const Forward& call;
  const Queries queries;
  const Place after;  // the block that this thread probably works on next
  TileParts<W> parts;
  Products<W> products;
  OnlineSoftmax<W> softmax;
  TopList<W> top;
  Context<W> context;
  Strip<W> strip;
  Prefetcher prefetcher;
  bool some_blocked = false, select_values = false, finite = true;

  Block(const Queries& queries, Place after, int64_t slot, Arena& arena)
      : call(queries.call),
        queries(queries),
        after(after),
        parts(this->queries, arena),
        products(this->queries, arena),
        softmax(this->queries, arena),
        top(this->queries, arena),
        context(this->queries, arena),
        strip(this->queries, slot, arena) {}

  void run() {
    parts.start();
    read_tiles();
    // A value that is not finite also reaches the rows that may not read it, by 0 * NaN.
    if (!finite && some_blocked) select_values = true, read_tiles();
    finish();
  }

 private:
  void read_tiles() {
    products.load_queries();
    context.start(), softmax.start(), top.start(), strip.start();
    const Ranges& ranges = parts.ranges;
    const int64_t last = min(call.source, (ranges.last + 1) & ~(int64_t)1);  // whole pairs
    const int64_t begin = ranges.first & ~(int64_t)7;
    // Prefetches begin late, so that the lines are still in the cache when they are needed.
    const int64_t late = max(begin, last - 4 * kTile), tiles_left = max(1, (last - late) / kTile);
    prefetcher.plan(queries, ranges, lanes, after);
    for (int64_t from = begin; from < last; from += kTile) {
      if (from >= late && prefetcher.waits()) prefetcher.start(tiles_left * (kTile + call.value_dim) / 8);
      const int64_t n = min(kTile, last - from);
      const Tile kind = parts.find(from, n, select_values);
      if (kind != Tile::empty) read_tile(from, n, kind);
      some_blocked |= kind == Tile::partial;
      if ((from - begin) / kTile % kFoldTiles == kFoldTiles - 1 && from + n < last) {
        context.fold(softmax.exponent, softmax.row_max);
        softmax.fold();
      }
    }
    context.finish(softmax.exponent, softmax.row_max);
    softmax.finish();
    finite = context.all_finite_sums();
  }

  void read_tile(int64_t from, int64_t n, Tile kind) {
    const bool masked = kind == Tile::partial, rest = (masked || parts.used < W) && (strip.whole || call.top);
    alignas(64) float most[lanes];
    float* tile = strip.next();
    products.compute(tile, from, n, kind, parts, prefetcher);
    if (rest) parts.fill_rest(tile, n, -INFINITY);
    softmax.find_most(tile, parts, most);
    if (call.top) top.gather(tile, from, n, most);
    if (call.max_score) softmax.keep_best(most);
    if (call.entropy) weigh<true>(tile, most);
    else weigh<false>(tile, most);
    if (call.out.data)
      context.add(tile, from, n, select_values && masked, softmax.rescale, parts, products, prefetcher);
    if (rest) parts.fill_rest(tile, n, 0);
    strip.push(from, n, softmax.row_max);
  }

  template <bool entropy>
  void weigh(float* tile, const float* most) {
    softmax.template update<entropy>(tile, parts, most, context.takes_pairs(), context.weight_pairs,
                                     strip.whole || select_values);
  }

  void finish() {
    if (call.out_of_range && (!finite || softmax.is_out_of_range(parts.ranges)))
      call.out_of_range->store(true, std::memory_order_relaxed);
    softmax.normalize();
    if (call.out.data) context.write(softmax, products.packed);  // the packed queries are no longer needed
    if (call.lse || call.row_max || call.entropy || call.max_score) softmax.write();
    if (call.top) write_top();
    if (strip.whole) strip.read(softmax, parts);
  }

  void write_top() {
    for (int64_t lane = 0; lane < queries.count; ++lane)
      if (softmax.row_sum[lane] != softmax.row_sum[lane]) top.take_first(lane, parts);
    top.finish();
    top.write(softmax);
  }
};

template <int W>
void run_block(const Queries& queries, Place after, int64_t slot, Arena arena) {
  Block<W>(queries, after, slot, arena).run();
}

Place first_place(const Forward& call, int64_t item) {
  const int64_t row = item / call.slots;
  return {row / call.head, row % call.head, (call.slots - 1 - item % call.slots) * kWide};
}

// Work item: every `slots`-th block of one head, the last blocks first (they read most sources).
void forward_item(const Forward& call, int64_t item, char* scratch) {
  Place here = first_place(call, item);
  const int64_t slot = here.first / kWide;
  const int64_t other = item + call.threads < call.batch * call.head * call.slots ? item + call.threads : item;
  for (Place next; here.first < call.query; here = next) {
    const Arena arena{scratch};
    const int64_t left = call.query - here.first;
    next = {here.batch, here.head, here.first + call.slots * kWide};
    const Place after = next.first < call.query ? next : first_place(call, other);
    const Queries queries = queries_of(call, here.batch, here.head, here.first, min(left, kWide));
    if (left > 3 * N) run_block<Vec::wide>(queries, after, slot, arena);
    else if (left > 2 * N) run_block<3>(queries, after, slot, arena);
    else if (left > N) run_block<2>(queries, after, slot, arena);
    else run_block<1>(queries, after, slot, arena);
  }
}

size_t forward_scratch(const Forward& call) {
  Arena arena{nullptr};
  Block<Vec::wide> block(queries_of(call, 0, 0, 0, 0), Place{}, 0, arena);
  return arena.used + 64;
}

// K or V of one source head as pairs of neighbouring sources, for bf16 dot products.
void pack_sources(const Forward& call, const View& view, int64_t width, int64_t item, uint32_t* packed) {
  const int64_t pairs = (call.source + 1) / 2;
  const int64_t batch = item / call.source_head, head = item % call.source_head;
  uint32_t* to = packed + item * pairs * width;
  for (int64_t s = 0; s < pairs; ++s, to += width) {
    const auto* low = (const uint16_t*)at(view, call.type, batch, head, 2 * s);
    const bool both = 2 * s + 1 < call.source;
    const uint16_t* high = both ? low + view.position : low;
    for (int64_t i = 0; i < width; ++i) to[i] = low[i] | (both ? (uint32_t)high[i] << 16 : 0);
  }
}

void exp2_array(const float* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + N <= count; i += N) Vec::store(to + i, Vec::exp2(Vec::load(from + i)));
  if (i == count) return;
  float rest[N] = {0};
  for (int64_t j = i; j < count; ++j) rest[j - i] = from[j];
  Vec::store(rest, Vec::exp2(Vec::load(rest)));
  for (int64_t j = i; j < count; ++j) to[j] = rest[j - i];
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
