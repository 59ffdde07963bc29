// The largest scores of each query and their sources. After softmax.inl and select.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int kShortTop = 8;  // lists up to this length stay in registers while a tile is searched

// A sorted list for each lane or, where it is long, candidates that are sorted last. A tile without a score that enters
// it costs one comparison.
template <int W>
struct TopList {
  static constexpr int lanes = W * N;
  const Forward& call;
  const Queries& queries;
  const int64_t length;    // of the sorted lists, or 1
  const int64_t capacity;  // of the candidates of a lane, 0 for short lists
  // [rank][lane]; the sources are int32 numbers, which only move. With candidates the score that enters must be above.
  float *scores, *sources;
  uint64_t *candidates, *room;  // [lane][capacity] and what sorting one lane takes
  int64_t* counts;
  float* highest;  // of each lane, in all tiles before

  TopList(const Queries& queries, Arena& arena)
      : call(queries.call),
        queries(queries),
        length(!call.top              ? 0
               : call.top > kShortTop ? 1
                                      : kShortTop),
        capacity(call.top > kShortTop ? min(call.top + 2 * max(call.top, kTile), max(call.source, 1)) : 0),
        scores(arena.take<float>(length * lanes)),
        sources(arena.take<float>(length * lanes)),
        candidates(arena.take<uint64_t>(capacity * lanes)),
        room(arena.take<uint64_t>(capacity ? call.top : 0)),
        counts(arena.take<int64_t>(capacity ? lanes : 0)),
        highest(arena.take<float>(capacity ? lanes : 0)) {}

  void start() {
    for (int64_t i = 0; i < length * lanes; ++i) scores[i] = -INFINITY;
    std::memset(sources, 0xff, sizeof(float) * length * lanes);  // -1
    if (capacity) std::memset(counts, 0, sizeof(int64_t) * lanes);
    for (int64_t i = 0; capacity && i < lanes; ++i) highest[i] = -INFINITY;
  }

  // `most` holds the largest score of each lane in the tile.
  void gather(const float* tile, int64_t from, int64_t n, const float* most) {
    const float* worst = scores + (length - 1) * lanes;
    for (int j = 0; j < W; ++j) {
      if (!Vec::greater(Vec::load(most + j * N), Vec::load(worst + j * N))) continue;
      if (!capacity) gather_short(tile + j * N, from, n, j * N);
      else gather_long(tile + j * N, from, n, j * N);
    }
    for (int j = 0; capacity && j < W; ++j)
      Vec::store(highest + j * N, Vec::max(Vec::load(highest + j * N), Vec::load(most + j * N)));
  }

  void finish() {
    for (int64_t lane = 0; capacity && lane < queries.count; ++lane) {
      uint64_t* keys = candidates + lane * capacity;
      if (counts[lane] > call.top) counts[lane] = select_largest(keys, counts[lane], call.top, call.top);
      sort_largest(keys, counts[lane], room);
    }
  }

  void write(const OnlineSoftmax<W>& softmax) const {
    for (int64_t lane = 0; lane < queries.count; ++lane) {
      const f factor = Vec::set1(softmax.exponent.factor), most = Vec::set1(softmax.row_max[lane]);
      const f rescale = Vec::set1(softmax.rescale[lane]);
      float* weights = call.top_weights + queries.row(lane) * call.top;
      int64_t* to = call.top_sources + queries.row(lane) * call.top;
      for (int64_t first = 0; first < call.top; first += N) {
        const int64_t n = min(N, call.top - first);
        alignas(64) float weight[N] = {};
        int32_t source[N];
        for (int64_t k = 0; k < n; ++k) weight[k] = entry(first + k, lane, source + k);
        // NaN in a row that reads one
        Vec::store(weight, Vec::mul(softmax.exponent.exp(Vec::fms(Vec::load(weight), factor, most)), rescale));
        for (int64_t k = 0; k < n; ++k) weights[first + k] = source[k] < 0 ? 0 : weight[k], to[first + k] = source[k];
      }
    }
  }

  // All weights of a row that reads a NaN are NaN and tie: its top sources are the first that it may read.
  void take_first(int64_t lane, TileParts<W>& parts) {
    int64_t found = 0;
    if (capacity) counts[lane] = 0;
    for (int64_t from = parts.ranges.first & ~(int64_t)7; from < parts.ranges.last; from += kTile) {
      const int64_t n = min(kTile, parts.ranges.last - from);
      const Tile kind = parts.find_bits(from, n);
      for (int64_t s = 0; s < n && kind != Tile::empty; ++s)
        if (found < call.top && (kind == Tile::full || parts.bits[s] >> lane & 1)) {
          const int32_t source = (int32_t)(from + s);
          if (capacity) candidates[lane * capacity + counts[lane]++] = key_of(0, source);
          else std::memcpy(sources + found * lanes + lane, &source, 4);
          ++found;
        }
    }
  }

 private:
  void gather_short(const float* tile, int64_t from, int64_t n, int lane) {
    f best[kShortTop], places[kShortTop];
    for (int k = 0; k < kShortTop; ++k)
      best[k] = Vec::load(scores + k * lanes + lane), places[k] = Vec::load(sources + k * lanes + lane);
    for (int64_t s = 0; s < n; ++s) {
      f score = Vec::load(tile + s * lanes);
      if (!Vec::greater(score, best[kShortTop - 1])) continue;
      f source = Vec::same_bits((int32_t)(from + s));
      uint64_t moved = 0;  // all entries below the new score move down, ties included
      CLEARHEAD_UNROLL_FOR (int k = 0; k < kShortTop; ++k) {
        moved |= Vec::greater(score, best[k]);
        const f old_score = best[k], old_source = places[k];
        best[k] = Vec::select(moved, score, old_score), places[k] = Vec::select(moved, source, old_source);
        score = Vec::select(moved, old_score, score), source = Vec::select(moved, old_source, source);
      }
    }
    for (int k = 0; k < kShortTop; ++k)
      Vec::store(scores + k * lanes + lane, best[k]), Vec::store(sources + k * lanes + lane, places[k]);
  }

  // Each source that is above the bound of its lane goes into the lane's candidates. When these are full, the k largest
  // and a few more stay and raise the bound: a source costs the same few operations whatever k and the order are.
  void gather_long(const float* tile, int64_t from, int64_t n, int lane) {
    uint64_t above[kTile];
    int64_t found = 0;
    const f worst = Vec::load(scores + lane);
    for (int64_t s = 0; s < n; ++s) {
      above[s] = Vec::greater(Vec::load(tile + s * lanes), worst);
      found += __builtin_popcountll(above[s]);
    }
    if (found > n * N / 2) {
      const uint64_t risen = n < call.top ? 0 : all_above(tile, n, lane);
      for (int j = 0; j < N; ++j)
        if (risen >> j & 1) restart(tile + j, from, n, lane + j);
        else append_column(tile + j, from, n, lane + j);
      return;
    }
    for (int64_t s = 0; s < n; ++s)
      for (uint64_t bits = above[s]; bits; bits &= bits - 1) {
        const int at = lane + __builtin_ctzll(bits);
        const float number = tile[s * lanes + at - lane];
        if (counts[at] == capacity) drop_smallest(at);
        if (number > scores[at]) candidates[at * capacity + counts[at]++] = key_of(number, (int32_t)(from + s));
      }
  }

  // The lanes whose scores in the tile are all above those of the tiles before.
  uint64_t all_above(const float* tile, int64_t n, int lane) const {
    uint64_t above = ~0ull;
    const f before = Vec::load(highest + lane);
    for (int64_t s = 0; s < n; ++s) above &= Vec::greater(Vec::load(tile + s * lanes), before);
    return above;
  }

  // A tile of at least k such scores replaces all candidates: rising scores need no selection.
  void restart(const float* column, int64_t from, int64_t n, int lane) {
    uint64_t* const keys = candidates + lane * capacity;
    float least = column[0];
    for (int64_t s = 0; s < n; ++s) {
      const float number = column[s * lanes];
      keys[s] = key_of(number, (int32_t)(from + s));
      least = number < least ? number : least;
    }
    counts[lane] = n, scores[lane] = least;
  }

  // Gathers from one lane, most of whose scores may enter: no branch depends on them.
  void append_column(const float* column, int64_t from, int64_t n, int lane) {
    if (counts[lane] + n > capacity) drop_smallest(lane);
    uint64_t* const keys = candidates + lane * capacity;
    const float worst = scores[lane];
    int64_t count = counts[lane];
    for (int64_t s = 0; s < n; ++s) {
      const float number = column[s * lanes];
      keys[count] = key_of(number, (int32_t)(from + s));
      count += number > worst;
    }
    counts[lane] = count;
  }

  void drop_smallest(int64_t lane) {
    uint64_t* keys = candidates + lane * capacity;
    counts[lane] = select_largest(keys, counts[lane], call.top, (capacity + call.top) / 2);
    uint64_t least = keys[0];
    for (int64_t i = 1; i < counts[lane]; ++i) least = keys[i] < least ? keys[i] : least;
    scores[lane] = score_of(least);
  }

  float entry(int64_t k, int64_t lane, int32_t* source) const {
    if (!capacity) {
      std::memcpy(source, sources + k * lanes + lane, 4);
      return scores[k * lanes + lane];
    }
    const bool there = k < counts[lane];
    const uint64_t key = there ? candidates[lane * capacity + k] : 0;
    *source = there ? (int32_t)~(uint32_t)key : -1;
    return there ? score_of(key) : -INFINITY;
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
