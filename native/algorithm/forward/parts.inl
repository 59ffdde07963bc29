// Which parts of a tile of sources some query of a block may read. After scores.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int64_t kGroup = 4;  // sources that are computed or skipped together

// A rectangle of a tile: sources [first, last) and vectors of queries [begin, end).
struct Part {
  int64_t first, last;
  int begin, end;
};

template <int W>
struct TileParts {
  static constexpr int lanes = W * N, kMostVectors = W < Vec::together ? W : Vec::together;
  static constexpr int64_t kGroups = kTile / kGroup;
  const Forward& call;
  const Queries& queries;
  const bool raw;
  const int used;        // vectors that hold queries
  Ranges ranges;         // of the mask
  float* bias;           // of the tile, [source][lane], where the call has a bias
  uint64_t bits[kTile];  // the lanes that may read each source, unless the tile is full or `range` says it
  Part parts[W * (kGroups / 2)];
  int count;

  TileParts(const Queries& queries, Arena& arena)
      : call(queries.call),
        queries(queries),
        raw(keeps_raw_scores(call)),
        used((int)((queries.count + N - 1) / N)),
        bias(arena.take<float>(call.bias.data ? kTile * lanes : 0)) {}

  void start() { ranges = ranges_of(call.mask, queries, lanes); }

  // Finds the parts of the tile [from, from + n). Where a single range of each query decides, the parts follow from
  // its ends and `bits` is not filled, unless it is needed.
  Tile find(int64_t from, int64_t n, bool need_bits) {
    range = nullptr;
    if (raw && !need_bits && !call.mask.bytes) {
      Tile kind = ranges.count ? Tile::empty : Tile::full;
      int64_t met = 0;
      for (int64_t r = 0; r < ranges.count && kind != Tile::full; ++r) {
        const Range& one = ranges.all[r];
        if (from >= one.full_first && from + n <= one.full_last) kind = Tile::full;
        else if (from < one.last && from + n > one.first) kind = Tile::partial, range = &one, ++met;
      }
      if (kind == Tile::full) range = nullptr, group_all(n);
      else if (met == 1) group_range(from, n);
      if (kind != Tile::partial || met == 1) return kind;
      range = nullptr;
    }
    const Tile kind = find_bits(from, n);
    if (kind == Tile::full) group_all(n);
    else if (kind == Tile::partial) group_bits(n);
    return kind;
  }

  // Fills `bits` unless the tile is full or empty: by the mask, and by the bias where it is -inf. Loads the bias.
  Tile find_bits(int64_t from, int64_t n) {
    const Tile kind = tile_bits<W>(call.mask, ranges, queries, from, n, bits);
    if (!call.bias.data || kind == Tile::empty) return kind;
    load_bias<W>(queries, from, n, bias);
    return block_by_bias<W>(bias, n, kind, bits);
  }

  // Calls act(V, part) for each part, where V is the number of its vectors as a compile-time constant.
  template <class Act>
  void each(Act act) const {
    for (int p = 0; p < count; ++p)
      with_vectors<kMostVectors>(parts[p].end - parts[p].begin, [&](auto vectors) { act(vectors, parts[p]); });
  }

  // Calls act(source, vector) for each vector of each part.
  template <class Act>
  void each_vector(Act act, int64_t step = 1) const {
    for (int p = 0; p < count; ++p)
      for (int64_t s = parts[p].first; s < parts[p].last; s += step)
        for (int j = parts[p].begin; j < parts[p].end; ++j) act(s, j);
  }

  // Sets the blocked scores of a partial tile to -inf; for raw scores, which `finish_scores` does not edit.
  void mask_scores(float* tile, int64_t from, int64_t n) const {
    for (int j = 0; j < used; ++j)
      for (uint32_t edges = some[j] & ~whole[j]; edges; edges &= edges - 1) {
        const int64_t first = lowest_bit(edges) * kGroup;
        for (int64_t s = first; s < min(n, first + kGroup); ++s) {
          float* place = tile + (s * W + j) * N;
          const uint64_t allowed = range ? lanes_of(*range, j * N, from + s) : bits[s] >> (j * N);
          Vec::store(place, Vec::select(allowed, Vec::load(place), Vec::set1(-INFINITY)));
        }
      }
  }

  // Fills what belongs to no part, for readings that look at the whole tile.
  void fill_rest(float* tile, int64_t n, float value) const {
    for (int j = 0; j < W; ++j)
      for (int64_t s = 0; s < n; ++s)
        if (j >= used || !(some[j] >> (s / kGroup) & 1)) Vec::store(tile + (s * W + j) * N, Vec::set1(value));
  }

 private:
  uint32_t some[W], whole[W];  // by vector, one bit a group of sources: some lane, or every lane, may read it
  const Range* range;          // the only range that decides about this tile, or null

  void group_all(int64_t n) {
    for (int j = 0; j < used; ++j) some[j] = whole[j] = low_bits((n + kGroup - 1) / kGroup);
    cut(n);
  }

  void group_range(int64_t from, int64_t n) {
    for (int j = 0; j < used; ++j) {
      const CommonRange& one = range->vectors[j];
      const int64_t first = max(one.first - from, 0), last = min(one.last - from, n);
      const int64_t full_first = max(one.full_first - from, 0), full_last = min(one.full_last - from, n);
      some[j] = first < last ? low_bits((last + kGroup - 1) / kGroup) & ~low_bits(first / kGroup) : 0;
      const int64_t full = full_last == n ? (n + kGroup - 1) / kGroup : full_last / kGroup;
      whole[j] = full_first < full_last ? low_bits(full) & ~low_bits((full_first + kGroup - 1) / kGroup) : 0;
    }
    cut(n);
  }

  void group_bits(int64_t n) {
    for (int j = 0; j < used; ++j) some[j] = whole[j] = 0;
    for (int64_t s = 0; s < n; s += kGroup) {
      uint64_t any = 0, all = ~0ull;
      for (int64_t i = s; i < min(n, s + kGroup); ++i) any |= bits[i], all &= bits[i];
      for (int j = 0; j < used; ++j) {
        some[j] |= (uint32_t)((any >> (j * N) & lane_mask(N)) != 0) << (s / kGroup);
        whole[j] |= (uint32_t)((all >> (j * N) & lane_mask(N)) == lane_mask(N)) << (s / kGroup);
      }
    }
    cut(n);
  }

  // Cuts the tile into runs of groups. Neighbouring vectors with the same groups share their parts, so that the
  // context of a vector is loaded and stored once for each run.
  void cut(int64_t n) {
    count = 0;
    for (int j = 0, end; j < used; j = end) {
      for (end = j + 1; end < used && end < j + Vec::together && some[end] == some[j];) ++end;
      for (uint32_t rest = some[j]; rest;) {
        const int first = lowest_bit(rest), last = first + lowest_bit(~(rest >> first));
        parts[count++] = {first * kGroup, min(n, last * kGroup), j, end};
        rest &= ~low_bits(last);
      }
    }
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
