// The forward: one block of queries against its tiles of sources, and what is read on the way.
// After scores.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

bool uses_pairs(const Forward& call) { return Vec::has_dots && call.type == Type::bf16 && call.head_dim % 2 == 0; }
bool keeps_strip(const Forward& call) {
  return call.received || call.cell_sum || call.distance || call.mass || call.rows;
}

// Where a block of queries is
struct Place {
  int64_t batch, head, first;
};

// A part of a tile that is worked on: sources [first, last) and vectors of queries [begin, end)
struct Part {
  int64_t first, last;
  int begin, end;
};

constexpr int64_t kFew = 4;  // sources that are worked on or left out together

inline int lowest_bit(uint32_t bits) { return __builtin_ctz(bits); }
inline uint32_t low_bits(int64_t count) { return (1u << count) - 1; }

template <int W>
struct Block {
  static constexpr int lanes = W * N, kMost = W < Vec::together ? W : Vec::together;
  const Forward& call;
  int64_t batch, head, source_head, first, count, slot;
  bool pairs, strip, plain, base_two;

  // The running maximum is that of scores * unit: of base 2 where scores are plain products and a
  // multiply-add rounds once, natural where they may come close to the largest numbers.
  float *packed, *scores, *out, *row_max, *row_sum, *rescale, *neg_entropy, *convert;
  float unit;
  double natural;  // what takes it to base e
  uint32_t *packed_pairs, *weight_pairs;
  float *tile_max, *top_scores, *bias_tile, *top_sources;  // sources are int32, moved about as floats
  Ranges ranges;
  int64_t* tile_first;
  int64_t* tile_count;
  uint64_t bits[kTile];
  Kept kept;
  float* kept_weights;
  static constexpr int64_t kGroups = kTile / kFew;
  uint32_t some[W], whole[W];  // bit by bit the groups of sources that some lane of a vector, or every, may read
  const Range* range;          // that alone says who may read what, instead of `bits`
  Part parts[W * (kGroups / 2)];
  int part_count, used;  // used: vectors that hold queries
  uint32_t begun;        // bit by bit the vectors that have a context
  bool out_of_range = false, some_blocked = false, careful = false, spoiled = false;
  int64_t tiles = 0, top_rows;

  Block(const Forward& call, Arena& arena) : call(call), kept(call.dropout, lanes, arena) {
    pairs = uses_pairs(call), strip = keeps_strip(call), plain = is_plain(call);
    base_two = plain && Vec::fused;
    unit = plain ? (float)(std::fabs(call.scale) * (base_two ? kLog2eWide : 1)) : 1.f;
    natural = base_two ? std::fabs((double)call.scale) / unit : 1;  // ln 2, but for the rounding of the unit
    const int64_t tile_limit = call.source / kTile + 2;
    packed = arena.take<float>(max(call.head_dim, call.value_dim) * lanes);
    scores = arena.take<float>((strip ? tile_limit * kTile : kTile) * lanes);
    out = arena.take<float>(call.value_dim * lanes);
    row_max = arena.take<float>(lanes), row_sum = arena.take<float>(lanes), rescale = arena.take<float>(lanes);
    neg_entropy = arena.take<float>(lanes);
    convert = arena.take<float>(kTile * max(call.head_dim, call.value_dim));
    packed_pairs = arena.take<uint32_t>(pairs ? call.head_dim / 2 * lanes : 0);
    weight_pairs = arena.take<uint32_t>(pairs ? kTile / 2 * lanes : 0);
    bias_tile = arena.take<float>(call.bias.data ? kTile * lanes : 0);
    kept_weights = arena.take<float>(kept.some_dropped() ? kTile * lanes : 0);
    tile_max = arena.take<float>(strip ? tile_limit * lanes : 0);
    tile_first = arena.take<int64_t>(strip ? tile_limit : 0), tile_count = arena.take<int64_t>(strip ? tile_limit : 0);
    top_rows = call.top ? max(call.top, kShortTop) : 0;
    top_scores = arena.take<float>(top_rows * lanes), top_sources = arena.take<float>(top_rows * lanes);
  }

  int64_t row(int64_t lane) const {
    return (batch * call.head + head) * call.query_total + call.first_query + first + lane;
  }

  void start() {
    const float sign = plain && call.scale < 0 ? -1.f : 1.f;
    if (pairs)
      pack_pairs(call.q, call.type, batch, head, first, count, lanes, call.head_dim, sign, convert, packed_pairs);
    else pack_floats(call.q, call.type, batch, head, first, count, lanes, call.head_dim, sign, convert, packed);
    kept.start(row(0), call.source, lanes);
    float sink = -FLT_MAX, weight = 0;
    if (call.sinks && call.sinks[head] != -INFINITY) {
      sink = (float)fmin(fmax(call.sinks[head] / natural, -FLT_MAX), FLT_MAX);
      weight = (float)std::exp(call.sinks[head] - sink * natural);
    }
    for (int lane = 0; lane < lanes; ++lane) {
      row_max[lane] = sink, row_sum[lane] = weight;
      neg_entropy[lane] = 0;
    }
    begun = 0;
    for (int64_t i = 0; i < top_rows * lanes; ++i) top_scores[i] = -INFINITY;
    std::memset(top_sources, 0xff, sizeof(float) * top_rows * lanes);  // -1
    tiles = 0;
  }

  // Which lanes may read which source: by the mask, and where a bias is not -inf.
  Tile allow(int64_t from, int64_t n, uint64_t* allowed) {
    const Tile kind = tile_bits<W>(call.mask, ranges, batch, head, first, count, from, n, allowed);
    if (!call.bias.data || kind == Tile::empty) return kind;
    load_bias<W>(call.bias, batch, head, first, count, from, n, bias_tile);
    return block_by_bias<W>(bias_tile, n, kind, allowed);
  }

  // Which parts of a tile some query may read. Where one range of each query says it all the parts follow
  // from its ends.
  Tile look(int64_t from, int64_t n) {
    range = nullptr;
    if (plain && !careful && !call.mask.bytes) {
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
    const Tile kind = allow(from, n, bits);
    if (kind == Tile::full) group_all(n);
    else if (kind == Tile::partial) group_bits(n);
    return kind;
  }

  void group_all(int64_t n) {
    for (int j = 0; j < used; ++j) some[j] = whole[j] = low_bits((n + kFew - 1) / kFew);
    cut(n);
  }

  void group_range(int64_t from, int64_t n) {
    for (int j = 0; j < used; ++j) {
      const Common& one = range->vectors[j];
      const int64_t first = max(one.first - from, 0), last = min(one.last - from, n);
      const int64_t full_first = max(one.full_first - from, 0), full_last = min(one.full_last - from, n);
      some[j] = first < last ? low_bits((last + kFew - 1) / kFew) & ~low_bits(first / kFew) : 0;
      const int64_t full = full_last == n ? (n + kFew - 1) / kFew : full_last / kFew;
      whole[j] = full_first < full_last ? low_bits(full) & ~low_bits((full_first + kFew - 1) / kFew) : 0;
    }
    cut(n);
  }

  void group_bits(int64_t n) {
    for (int j = 0; j < used; ++j) some[j] = whole[j] = 0;
    for (int64_t s = 0; s < n; s += kFew) {
      uint64_t any = 0, all = ~0ull;
      for (int64_t i = s; i < min(n, s + kFew); ++i) any |= bits[i], all &= bits[i];
      for (int j = 0; j < used; ++j) {
        some[j] |= (uint32_t)((any >> (j * N) & lane_mask(N)) != 0) << (s / kFew);
        whole[j] |= (uint32_t)((all >> (j * N) & lane_mask(N)) == lane_mask(N)) << (s / kFew);
      }
    }
    cut(n);
  }

  // Stretches of sources, of neighbouring vectors together where they are alike: then the context of a
  // vector is taken up once a stretch.
  void cut(int64_t n) {
    part_count = 0;
    for (int j = 0, end; j < used; j = end) {
      for (end = j + 1; end < used && end < j + Vec::together && some[end] == some[j];) ++end;
      for (uint32_t rest = some[j]; rest;) {
        const int first = lowest_bit(rest), last = first + lowest_bit(~(rest >> first));
        parts[part_count++] = {first * kFew, min(n, last * kFew), j, end};
        rest &= ~low_bits(last);
      }
    }
  }

  // Scores that are plain products where some are blocked
  void block(float* tile, int64_t from, int64_t n) {
    for (int j = 0; j < used; ++j)
      for (uint32_t edges = some[j] & ~whole[j]; edges; edges &= edges - 1) {
        const int64_t first = lowest_bit(edges) * kFew;
        for (int64_t s = first; s < min(n, first + kFew); ++s) {
          float* place = tile + (s * W + j) * N;
          const uint64_t allowed = range ? lanes_of(*range, j * N, from + s) : bits[s] >> (j * N);
          Vec::store(place, Vec::select(allowed, Vec::load(place), Vec::set1(-INFINITY)));
        }
      }
  }

  // What no part holds, where a reading looks at it all the same
  void fill_rest(float* tile, int64_t n, float value) {
    for (int j = 0; j < W; ++j)
      for (int64_t s = 0; s < n; ++s)
        if (j >= used || !(some[j] >> (s / kFew) & 1)) Vec::store(tile + (s * W + j) * N, Vec::set1(value));
  }

  template <int V>
  static void find_most(const float* tile, int64_t n, float* most) {
    f now[V];
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) now[j] = Vec::load(most + j * N);
    for (int64_t s = 0; s < n; ++s, tile += lanes)
      CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) now[j] = Vec::max(Vec::load(tile + j * N), now[j]);
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) Vec::store(most + j * N, now[j]);
  }

  // Weights of scores, in place or as pairs of sources, or both.
  template <class E, int V, bool entropy, bool two>
  static void find_weights(float* tile, int64_t n, float unit, const float* most, float* total, float* spread,
                           uint32_t* to_pairs, bool keep) {
    constexpr int step = E::step;
    const f factor = Vec::set1(unit);
    f now[V], sum[V], more[V];
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) {
      now[j] = Vec::load(most + j * N), sum[j] = Vec::load(total + j * N);
      if (entropy) more[j] = Vec::load(spread + j * N);
    }
    auto weigh = [&](float* place, int j) {
      const f below = Vec::fms(Vec::load(place), factor, now[j]);
      const f weight = two ? Vec::exp2(below) : exp_of(below);
      sum[j] = Vec::add(sum[j], weight);
      if (entropy) more[j] = Vec::fma(weight, Vec::max(Vec::set1(-1000.f), below), more[j]);
      if (keep) Vec::store(place, weight);
      return weight;
    };
    int64_t s = 0;
    for (; s + step <= n; s += step, tile += step * lanes, to_pairs += (step - 1) * lanes)
      CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) {
        const f weight = weigh(tile + j * N, j);
        if constexpr (step == 2) E::pack(to_pairs + j * N, weight, weigh(tile + lanes + j * N, j));
      }
    if constexpr (step == 2)
      for (int j = 0; s < n && j < V; ++j) E::pack(to_pairs + j * N, weigh(tile + j * N, j), Vec::zero());
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) {
      Vec::store(total + j * N, sum[j]);
      if (entropy) Vec::store(spread + j * N, more[j]);
    }
  }

  // Softmax of one tile against the running maximum; scores become unnormalised weights in place.
  template <bool entropy>
  void soften(float* tile, int64_t n) {
    alignas(64) float most[lanes], sum[lanes], spread[lanes];
    for (int lane = 0; lane < lanes; ++lane) most[lane] = -INFINITY, sum[lane] = spread[lane] = 0;
    for (int p = 0; p < part_count; ++p)
      with_vectors<kMost>(parts[p].end - parts[p].begin, [&](auto vectors) {
        const int at = parts[p].begin * N;
        find_most<vectors>(tile + parts[p].first * lanes + at, parts[p].last - parts[p].first, most + at);
      });
    if (call.top) gather_top(tile, n, most);
    for (int at = 0; at < lanes; at += N) {
      const f raw = Vec::load(most + at), old = Vec::load(row_max + at), scaled = Vec::mul(raw, Vec::set1(unit));
      out_of_range |= (Vec::not_finite(scaled) & ~Vec::not_finite(raw)) != 0;
      const f now = Vec::max(scaled, old);
      const f drop = Vec::sub(old, now);
      const f shrink = exp_in_unit(drop);
      if (entropy) {
        const f moved =
            Vec::fma(Vec::max(Vec::set1(-1000.f), drop), Vec::load(row_sum + at), Vec::load(neg_entropy + at));
        Vec::store(neg_entropy + at, Vec::mul(moved, shrink));
      }
      Vec::store(rescale + at, shrink), Vec::store(row_max + at, now);
    }
    for (int p = 0; p < part_count; ++p)
      with_vectors<kMost>(parts[p].end - parts[p].begin, [&](auto vectors) {
        const int at = parts[p].begin * N;
        float* first = tile + parts[p].first * lanes + at;
        const int64_t count = parts[p].last - parts[p].first;
        auto find = [&](auto how, auto two) {
          using E = decltype(how);
          find_weights<E, vectors, entropy, two>(first, count, unit, row_max + at, sum + at, spread + at,
                                                 weight_pairs + parts[p].first / 2 * lanes + at,
                                                 E::step == 1 || strip || careful);
        };
        using Yes = std::true_type;
        using No = std::false_type;
#ifdef CLEARHEAD_DOTS
        // weights that may be dropped go to pairs later
        if (pairs && !kept.some_dropped()) return base_two ? find(Pair(), Yes()) : find(Pair(), No());
#endif
        base_two ? find(Single(), Yes()) : find(Single(), No());
      });
    for (int at = 0; at < lanes; at += N) {
      Vec::store(row_sum + at, Vec::fma(Vec::load(row_sum + at), Vec::load(rescale + at), Vec::load(sum + at)));
      if (entropy) Vec::store(neg_entropy + at, Vec::add(Vec::load(neg_entropy + at), Vec::load(spread + at)));
    }
  }

  f exp_in_unit(f x) const { return base_two ? Vec::exp2(x) : exp_of(x); }

  // The running top list of each lane, kept sorted; a tile whose maximum is no news costs one
  // compare. Short lists are moved about in registers.
  void gather_top(const float* tile, int64_t n, const float* tile_best) {
    const float* worst = top_scores + (top_rows - 1) * lanes;
    for (int j = 0; j < W; ++j) {
      if (!Vec::greater(Vec::load(tile_best + j * N), Vec::load(worst + j * N))) continue;
      if (top_rows == kShortTop) gather_short_top(tile + j * N, n, j * N);
      else gather_long_top(tile + j * N, n, j * N);
    }
  }

  void gather_short_top(const float* tile, int64_t n, int lane) {
    f scores[kShortTop], sources[kShortTop];
    for (int k = 0; k < kShortTop; ++k)
      scores[k] = Vec::load(top_scores + k * lanes + lane), sources[k] = Vec::load(top_sources + k * lanes + lane);
    for (int64_t s = 0; s < n; ++s) {
      f score = Vec::load(tile + s * lanes);
      if (!Vec::greater(score, scores[kShortTop - 1])) continue;
      f source = Vec::same_bits((int32_t)(tile_begin + s));
      uint64_t moved = 0;  // below the place of the new score all move down, ties included
      CLEARHEAD_UNROLL_FOR (int k = 0; k < kShortTop; ++k) {
        moved |= Vec::greater(score, scores[k]);
        const f old_score = scores[k], old_source = sources[k];
        scores[k] = Vec::select(moved, score, old_score), sources[k] = Vec::select(moved, source, old_source);
        score = Vec::select(moved, old_score, score), source = Vec::select(moved, old_source, source);
      }
    }
    for (int k = 0; k < kShortTop; ++k)
      Vec::store(top_scores + k * lanes + lane, scores[k]), Vec::store(top_sources + k * lanes + lane, sources[k]);
  }

  void gather_long_top(const float* tile, int64_t n, int lane) {
    float* worst = top_scores + (top_rows - 1) * lanes + lane;
    float* worst_source = top_sources + (top_rows - 1) * lanes + lane;
    for (int64_t s = 0; s < n; ++s) {
      const f score = Vec::load(tile + s * lanes), source = Vec::same_bits((int32_t)(tile_begin + s));
      uint64_t rises = Vec::greater(score, Vec::load(worst));
      if (!rises) continue;
      Vec::store(worst, Vec::select(rises, score, Vec::load(worst)));
      Vec::store(worst_source, Vec::select(rises, source, Vec::load(worst_source)));
      float *here = worst, *here_source = worst_source;
      for (int64_t k = top_rows - 1; k > 0; --k, here -= lanes, here_source -= lanes) {
        const f upper = Vec::load(here - lanes), upper_source = Vec::load(here_source - lanes);
        rises &= Vec::greater(score, upper);
        if (!rises) break;
        Vec::store(here - lanes, Vec::select(rises, score, upper));
        Vec::store(here_source - lanes, Vec::select(rises, source, upper_source));
        Vec::store(here, Vec::select(rises, upper, Vec::load(here)));
        Vec::store(here_source, Vec::select(rises, upper_source, Vec::load(here_source)));
      }
    }
  }

  int64_t tile_begin;
  Place next;  // the block that this thread probably works on then
  Ahead ahead;

  void expect(const View& view, int64_t batch, int64_t head, int64_t first, int64_t last, int64_t width, bool write) {
    const int64_t size = call.type == Type::f32 ? 4 : 2;
    ahead.add(at(view, call.type, batch, head, first), view.position * size, last - first, width * size, write);
  }

  // What this block will write, and what the next one reads that this one does not.
  void look_ahead() {
    ahead = {};
    if (call.out.data) expect(call.out, batch, head, first, first + count, call.value_dim, true);
    if (next.first == first && next.head == head && next.batch == batch) return;
    expect(call.q, next.batch, next.head, next.first, min(next.first + lanes, call.query), call.head_dim, false);
    const int64_t other = next.head / (call.head / call.source_head);
    const bool same = next.batch == batch && other == source_head;
    if (!ranges.count && !same) expect_sources(other, 0, call.source);
    for (int64_t r = 0; r < ranges.count; ++r) {
      const int64_t place = next.batch * call.mask.range_batch + next.head * call.mask.range_head + next.first;
      expect_sources(other, call.mask.start[r * call.mask.range_step + place],
                     same ? ranges.all[r].first : call.source);
    }
  }

  // The first of these sources, for the next block
  void expect_sources(int64_t head, int64_t begin, int64_t end) {
    begin = max(0, begin) & ~(int64_t)1, end = min(end, begin + kTile);
    if (begin >= end) return;
    expect(call.k, next.batch, head, begin, end, call.head_dim, false);
    if (!call.packed_v) return expect(call.v, next.batch, head, begin, end, call.value_dim, false);
    ahead.add((const char*)packed_values(next.batch, head, begin), call.value_dim * 4, (end - begin) / 2,
              call.value_dim * 4, false);
  }

  const uint32_t* packed_values(int64_t batch, int64_t source_head, int64_t from) const {
    return call.packed_v +
           ((batch * call.source_head + source_head) * ((call.source + 1) / 2) + from / 2) * call.value_dim;
  }

  void tile(int64_t from, int64_t n, Tile kind) {
    float* here = strip ? scores + tiles * kTile * lanes : scores;
    tile_begin = from;
    dot(here, from, n);
    if (!plain) edit<W>(call, here, n, bias_tile, kind == Tile::partial ? bits : nullptr, nullptr);
    else if (kind == Tile::partial) block(here, from, n);
    const bool rest = (kind == Tile::partial || used < W) && (strip || call.top);
    if (rest) fill_rest(here, n, -INFINITY);
    if (call.entropy) soften<true>(here, n);
    else soften<false>(here, n);
    mix(kept.some_dropped() ? drop(here, from, n) : here, from, n, kind);
    if (rest) fill_rest(here, n, 0);
    if (strip) {
      std::memcpy(tile_max + tiles * lanes, row_max, sizeof(float) * lanes);
      tile_first[tiles] = from, tile_count[tiles] = n;
      ++tiles;
    }
  }

  // What is read are the weights before dropout; what is mixed are these, which the scale is still to come to.
  const float* drop(const float* weights, int64_t from, int64_t n) {
    for (int p = 0; p < part_count; ++p)
      for (int64_t s = parts[p].first; s < parts[p].last; ++s)
        for (int j = parts[p].begin; j < parts[p].end; ++j) {
          const int64_t place = (s * W + j) * N;
          Vec::store(kept_weights + place,
                     Vec::select(kept.bits(j * N, from + s), Vec::load(weights + place), Vec::zero()));
        }
    if (pairs) pair_weights(kept_weights, n);
    return kept_weights;
  }

  void dot(float* here, int64_t from, int64_t n) {
    if (pairs) return dot_pairs(here, from);
    const Rows k = float_rows(call.k, call.type, batch, source_head, from, n, call.head_dim, convert);
    dot_parts<Single>(k.data, k.stride, packed, call.head_dim, here);
  }

  // act(first, last) for chunks of [first, last) while something is still to be asked for in between.
  template <int V, class Act>
  void in_chunks(int64_t first, int64_t last, Act act) {
    constexpr int64_t chunk = 2 * kRowsBy<V>;
    for (; !ahead.done() && last - first > chunk; first += chunk) act(first, first + chunk), ahead.step();
    act(first, last), ahead.step();
  }

  template <class E>
  void dot_parts(const typename E::scalar* rows, int64_t stride, const typename E::packed* queries, int64_t depth,
                 float* here) {
    for (int p = 0; p < part_count; ++p)
      with_vectors<kMost>(parts[p].end - parts[p].begin, [&](auto vectors) {
        const int64_t at = parts[p].begin * N;
        in_chunks<vectors>(parts[p].first, parts[p].last, [&](int64_t first, int64_t last) {
          dot_part<E, vectors>(rows + first * stride, stride, last - first, queries + at, lanes, depth,
                               here + first * lanes + at);
        });
      });
  }

  // Each vector's context begins or is rescaled with the first part that adds to it.
  template <class E>
  void mix_parts(const typename E::scalar* values, int64_t stride, const typename E::packed* weights,
                 const uint64_t* allowed = nullptr) {
    alignas(64) float factor[lanes];
    std::memcpy(factor, rescale, sizeof factor);
    for (int p = 0; p < part_count; ++p)
      with_vectors<kMost>(parts[p].end - parts[p].begin, [&](auto vectors) {
        const int64_t first = parts[p].first / E::step, last = (parts[p].last + E::step - 1) / E::step,
                      at = parts[p].begin * N;
        const uint32_t mine = low_bits(parts[p].end) & ~low_bits(parts[p].begin);
        const bool fresh = !allowed && !(begun & mine);
        if (!fresh) begin_context(mine);
        begun |= mine;
        if constexpr (E::step == 1)
          if (allowed)
            mix_selected_part(values + first * stride, stride, last - first, weights + first * lanes + at, lanes,
                              vectors, allowed + first, parts[p].begin, factor + at, call.value_dim, out + at);
        if (!allowed)
          in_chunks<vectors>(0, call.value_dim, [&](int64_t begin, int64_t end) {
            mix_part<E, vectors>(values + first * stride + begin * E::step, stride, last - first,
                                 weights + first * lanes + at, lanes, fresh ? nullptr : factor + at, end - begin,
                                 out + begin * lanes + at);
          });
        for (int64_t lane = at; lane < parts[p].end * N; ++lane) factor[lane] = 1;
      });
  }

  // The context of those of these vectors that have none yet is 0.
  void begin_context(uint32_t vectors) {
    for (uint32_t rest = vectors & ~begun; rest; rest &= rest - 1)
      for (int64_t i = 0; i < call.value_dim; ++i) Vec::store(out + (i * W + lowest_bit(rest)) * N, Vec::zero());
    begun |= vectors;
  }

  void mix(const float* weights, int64_t from, int64_t n, Tile kind) {
    const bool select = careful && kind == Tile::partial;
    if (pairs && !select) return mix_pairs(from);
    const Rows v = float_rows(call.v, call.type, batch, source_head, from, n, call.value_dim, convert);
    const bool finite = !select || all_finite<W>(v, n, call.value_dim);
    if (pairs && finite) return mix_pairs(from);
    mix_parts<Single>(v.data, v.stride, weights, finite ? nullptr : bits);
  }

#ifdef CLEARHEAD_DOTS
  void dot_pairs(float* here, int64_t from) {
    const auto* k = (const uint16_t*)at(call.k, call.type, batch, source_head, from);
    dot_parts<Pair>(k, call.k.position, packed_pairs, call.head_dim / 2, here);
  }

  void pair_weights(const float* weights, int64_t n) {
    for (int p = 0; p < part_count; ++p)
      for (int64_t s = parts[p].first; s < parts[p].last; s += 2)
        for (int j = parts[p].begin; j < parts[p].end; ++j) {
          const float* low = weights + (s * W + j) * N;
          Vec::store_pair(weight_pairs + (s / 2 * W + j) * N, Vec::load(low),
                          s + 1 < n ? Vec::load(low + lanes) : Vec::zero());
        }
  }

  void mix_pairs(int64_t from) {
    mix_parts<Pair>((const uint16_t*)packed_values(batch, source_head, from), 2 * call.value_dim, weight_pairs);
  }
#else
  void dot_pairs(float*, int64_t) {}
  void pair_weights(const float*, int64_t) {}
  void mix_pairs(int64_t) {}
#endif

  void run() {
    ranges = ranges_of(call.mask, batch, head, first, count, lanes, call.source);
    read_tiles();
    // A value that is not finite spoils the rows that may not read it too, by 0 * NaN.
    if (spoiled && some_blocked) careful = true, read_tiles();
    finish();
  }

  void read_tiles() {
    start();
    const int64_t last = min(call.source, (ranges.last + 1) & ~(int64_t)1);  // whole pairs
    const int64_t begin = ranges.first & ~(int64_t)7;
    // Not too long before they are needed, or they would be gone again.
    const int64_t late = max(begin, last - 4 * kTile), tiles_left = max(1, (last - late) / kTile);
    look_ahead();
    for (int64_t from = begin; from < last; from += kTile) {
      if (from >= late && ahead.waits()) ahead.start(tiles_left * (kTile + call.value_dim) / 8);
      const int64_t n = min(kTile, last - from);
      const Tile kind = look(from, n);
      if (kind != Tile::empty) tile(from, n, kind);
      some_blocked |= kind == Tile::partial;
    }
    begin_context(low_bits(W));
    spoiled = !all_finite_context();
  }

  bool all_finite_context() const {
    f sum[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};  // of zeros, or NaN
    const int64_t count = call.value_dim * W;
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
      CLEARHEAD_UNROLL_FOR (int k = 0; k < 4; ++k) sum[k] = Vec::fma(Vec::load(out + (i + k) * N), Vec::zero(), sum[k]);
    for (; i < count; ++i) sum[0] = Vec::fma(Vec::load(out + i * N), Vec::zero(), sum[0]);
    return !Vec::not_finite(Vec::add(Vec::add(sum[0], sum[1]), Vec::add(sum[2], sum[3])));
  }

  void finish() {
    if (call.odd && is_odd()) call.odd->store(true, std::memory_order_relaxed);
    for (int lane = 0; lane < lanes; ++lane) rescale[lane] = row_sum[lane] == 0 ? 0 : 1 / row_sum[lane];
    if (call.out.data) write_context();
    if (call.lse || call.row_max || call.entropy || call.top) write_statistics();
    if (strip) weigh();
  }

  bool is_odd() const {
    bool bad = out_of_range || spoiled;
    if (bad || surely_even()) return bad;
    for (int64_t lane = 0; lane < count; ++lane) {
      bool seen = !ranges.count;
      for (int64_t r = 0; r < ranges.count; ++r) seen |= ranges.all[r].start[lane] < ranges.all[r].stop[lane];
      bad |= is_odd_row(call, (float)(row_max[lane] * natural), row_sum[lane],
                        seen && !call.mask.bytes && !call.bias.data);
    }
    return bad;
  }

  // As nearly always: every row has a sum and a maximum well inside the range.
  bool surely_even() const {
    const f zero = Vec::zero(), limit = Vec::set1(1e7f);
    uint64_t even = lane_mask(N);
    for (int at = 0; at < used * N; at += N) {
      const f sum = Vec::load(row_sum + at), top = Vec::load(row_max + at);
      even &= Vec::greater(sum, zero) & ~Vec::not_finite(sum);
      even &= Vec::greater(limit, top) & Vec::greater(top, Vec::sub(zero, limit));
    }
    return even == lane_mask(N);
  }

  void write_context() {
    alignas(64) float factor[lanes];
    for (int lane = 0; lane < lanes; ++lane) factor[lane] = rescale[lane] * kept.scale();
    auto scaled = [this, &factor](int64_t i, int64_t lane) {
      return Vec::mul(Vec::load(out + i * lanes + lane), Vec::load(factor + lane));
    };
    const int64_t stride = call.out.position;
    char* to = (char*)at(call.out, call.type, batch, head, first);
    const bool whole = count % N == 0;
    if (whole && call.type == Type::f32 && call.value_dim % N == 0)
      transpose_whole(call.value_dim, count, scaled, (float*)to, stride);
#ifdef CLEARHEAD_DOTS
    else if (whole && call.type == Type::bf16 && call.value_dim % (2 * N) == 0 && stride % 2 == 0)
      transpose_whole(
          call.value_dim / 2, count,
          [=](int64_t i, int64_t lane) { return Vec::pair_of(scaled(2 * i, lane), scaled(2 * i + 1, lane)); },
          (float*)to, stride / 2);
#endif
    else write_rows_of_context(scaled);
    const int64_t size = call.type == Type::f32 ? 4 : 2;
    for (int64_t lane = 0; lane < count; ++lane)
      if (row_sum[lane] == 0) std::memset(to + lane * stride * size, 0, size * call.value_dim);
  }

  template <class Scaled>
  void write_rows_of_context(Scaled scaled) {
    for (int64_t i = 0; i < call.value_dim; ++i)
      for (int lane = 0; lane < lanes; lane += N) Vec::store(out + i * lanes + lane, scaled(i, lane));
    const bool direct = call.type == Type::f32;
    float* rows = direct ? (float*)at(call.out, call.type, batch, head, first) : packed;  // packed has served
    const int64_t stride = direct ? call.out.position : call.value_dim;
    transpose(out, lanes, call.value_dim, count, rows, stride);
    for (int64_t lane = 0; lane < count && !direct; ++lane)
      to_halves(rows + lane * stride, call.value_dim, call.type,
                (uint16_t*)at(call.out, call.type, batch, head, first + lane));
  }

  void write_statistics() {
    for (int64_t lane = 0; lane < count; ++lane) {
      const bool empty = row_sum[lane] == 0;
      const float log_sum = empty ? 0 : std::log(row_sum[lane]);
      const double most = empty ? 0 : row_max[lane] * natural;
      if (call.lse) call.lse[row(lane)] = empty ? -INFINITY : (float)(most + log_sum);
      if (call.row_max) {
        const float rounded = (float)most;
        call.row_max[row(lane)] = rounded, call.row_scale[row(lane)] = rescale[lane] * (float)std::exp(rounded - most);
      }
      if (call.entropy) {
        // the sink counts in the denominator, and is no source
        const float below = call.sinks ? (float)(call.sinks[head] - most) : -INFINITY, sink = std::exp(below);
        const float spread = neg_entropy[lane] * (float)natural - (sink > 0 ? sink * below : 0);
        call.entropy[row(lane)] = empty ? 0 : (log_sum * (row_sum[lane] - sink) - spread) * rescale[lane];
      }
      if (call.top && row_sum[lane] != row_sum[lane]) first_as_top(lane);
    }
    if (call.top) write_top();
  }

  void write_top() {
    for (int64_t k = 0; k < call.top; ++k) {
      float weight[lanes];
      for (int j = 0; j < W; ++j) {
        const f below =
            Vec::fms(Vec::load(top_scores + k * lanes + j * N), Vec::set1(unit), Vec::load(row_max + j * N));
        Vec::store(weight + j * N, Vec::mul(exp_in_unit(below), Vec::load(rescale + j * N)));  // NaN in a poisoned row
      }
      for (int64_t lane = 0; lane < count; ++lane) {
        int32_t source;
        std::memcpy(&source, top_sources + k * lanes + lane, 4);
        call.top_weights[row(lane) * call.top + k] = source < 0 ? 0 : weight[lane];
        call.top_sources[row(lane) * call.top + k] = source;
      }
    }
  }

  // All weights of a row with a NaN are NaN and tie: its top sources are the first it may read.
  void first_as_top(int64_t lane) {
    int64_t found = 0;
    for (int64_t from = ranges.first & ~(int64_t)7; from < ranges.last; from += kTile) {
      const int64_t n = min(kTile, ranges.last - from);
      const Tile kind = allow(from, n, bits);
      for (int64_t s = 0; s < n && kind != Tile::empty; ++s)
        if (found < call.top && (kind == Tile::full || bits[s] >> lane & 1)) {
          const int32_t source = (int32_t)(from + s);
          std::memcpy(top_sources + found++ * lanes + lane, &source, 4);
        }
    }
  }

  // ---- readings that need final weights: one pass over the strip of unnormalised ones -----------

  void weigh() {
    alignas(64) float factor[lanes], distance[lanes], mass[lanes], cell_sum[lanes], cell_max[lanes];
    for (int lane = 0; lane < lanes; ++lane) distance[lane] = mass[lane] = cell_sum[lane] = cell_max[lane] = 0;
    int64_t cell = 0;
    const bool poisoned = !all_finite<W>({row_sum, lanes}, 1, lanes);
    for (int64_t t = 0; t < tiles; ++t) {
      for (int j = 0; j < W; ++j) {
        const f shift = exp_in_unit(Vec::sub(Vec::load(tile_max + t * lanes + j * N), Vec::load(row_max + j * N)));
        Vec::store(factor + j * N, Vec::mul(shift, Vec::load(rescale + j * N)));
      }
      for (int64_t lane = count; lane < lanes; ++lane) factor[lane] = 0;
      float* weights = scores + t * kTile * lanes;
      if (poisoned || call.rows || call.distance || call.mass) {
        for (int64_t i = 0; i < tile_count[t] * W; ++i)
          Vec::store(weights + i * N, Vec::mul(Vec::load(weights + i * N), Vec::load(factor + i % W * N)));
        for (int lane = 0; lane < lanes; ++lane) factor[lane] = 1;
        if (poisoned) clear_blocked(weights, tile_first[t], tile_count[t]);
        if (call.rows) write_rows(weights, t);
        if (call.distance) add_distance(weights, t, distance);
        if (call.mass) add_mass(weights, t, mass);
      }
      if (call.received && call.cell_sum) cell = survey<true, true>(weights, factor, t, cell, cell_sum, cell_max);
      else if (call.received) survey<true, false>(weights, factor, t, 0, cell_sum, cell_max);
      else if (call.cell_sum) cell = survey<false, true>(weights, factor, t, cell, cell_sum, cell_max);
    }
    if (call.cell_sum && tiles) flush_cells(cell, cell_sum, cell_max);
    for (int64_t lane = 0; lane < count; ++lane) {
      if (call.distance) call.distance[row(lane)] = distance[lane];
      if (call.mass) call.mass[row(lane)] = mass[lane];
    }
  }

  // What a tile's sources received from these queries, and its share of the block map's cells.
  template <bool received, bool cells>
  int64_t survey(const float* weights, const float* factor, int64_t t, int64_t cell, float* sum, float* most) {
    float* to = received
                    ? call.received + ((slot * call.batch + batch) * call.head + head) * call.source + tile_first[t]
                    : nullptr;
    f partial[kTile];
    int64_t s = 0;
    while (s < tile_count[t]) {
      int64_t stop = tile_count[t];
      if (cells) {
        for (; tile_first[t] + s >= call.source_edges[cell + 1]; ++cell) flush_cells(cell, sum, most);
        stop = min(stop, call.source_edges[cell + 1] - tile_first[t]);
      }
      f times[W], total[W], best[W];
      for (int j = 0; j < W; ++j)
        times[j] = Vec::load(factor + j * N), total[j] = Vec::load(sum + j * N), best[j] = Vec::load(most + j * N);
      for (; s < stop; ++s) {
        f across = Vec::zero();
        for (int j = 0; j < W; ++j) {
          const f weight = Vec::mul(Vec::load(weights + (s * W + j) * N), times[j]);
          if (cells) total[j] = Vec::add(total[j], weight), best[j] = Vec::max(best[j], weight);
          if (received) across = Vec::add(across, weight);
        }
        if (received) partial[s] = across;
      }
      for (int j = 0; cells && j < W; ++j) Vec::store(sum + j * N, total[j]), Vec::store(most + j * N, best[j]);
    }
    for (s = 0; received && s + N <= tile_count[t]; s += N)
      Vec::store(to + s, Vec::add(Vec::load(to + s), Vec::sum_each(partial + s)));
    for (; received && s < tile_count[t]; ++s) to[s] += Vec::sum(partial[s]);
    return cell;
  }

  // A row with a NaN has weights of NaN, but only at the sources that it may read.
  void clear_blocked(float* weights, int64_t from, int64_t n) {
    if (allow(from, n, bits) != Tile::partial) return;
    for (int64_t i = 0; i < n * W; ++i)
      Vec::store(weights + i * N, Vec::select(bits[i / W] >> (i % W * N), Vec::load(weights + i * N), Vec::zero()));
  }

  void write_rows(const float* weights, int64_t t) {
    for (int64_t lane = 0; lane < count; ++lane) {
      const int32_t place = call.row_of[call.first_query + first + lane];
      if (place < 0) continue;
      float* to = call.rows + ((batch * call.head + head) * call.row_count + place) * call.source + tile_first[t];
      for (int64_t s = 0; s < tile_count[t]; ++s) to[s] = weights[s * lanes + lane];
    }
  }

  void add_distance(const float* weights, int64_t t, float* distance) {
    for (int lane = 0; lane < lanes; ++lane) {
      const int64_t here = call.first_query + first + lane + call.distance_offset;
      float sum = distance[lane];
      for (int64_t s = 0; s < tile_count[t]; ++s) {
        const int64_t far = here - tile_first[t] - s;
        sum += weights[s * lanes + lane] * (float)(far < 0 ? -far : far);
      }
      distance[lane] = sum;
    }
  }

  void add_mass(const float* weights, int64_t t, float* mass) {
    const Ranges ranges = ranges_of(call.mass_edges, batch, head, first, count, lanes, call.source);
    uint64_t edges[kTile];
    const Tile kind =
        tile_bits<W>(call.mass_edges, ranges, batch, head, first, count, tile_first[t], tile_count[t], edges);
    if (kind == Tile::empty) return;
    for (int64_t s = 0; s < tile_count[t]; ++s)
      for (int j = 0; j < W; ++j) {
        const f weight = Vec::load(weights + (s * W + j) * N);
        const f counted = kind == Tile::full ? weight : Vec::select(edges[s] >> (j * N), weight, Vec::zero());
        Vec::store(mass + j * N, Vec::add(Vec::load(mass + j * N), counted));
      }
  }

  void flush_cells(int64_t cell, float* sum, float* most) {
    int64_t row = 0;
    const int64_t base = ((slot * call.batch + batch) * call.head + head) * call.query_cells;
    for (int64_t lane = 0; lane < count; ++lane) {
      while (call.first_query + first + lane >= call.query_edges[row + 1]) ++row;
      const int64_t place = (base + row) * call.source_cells + cell;
      call.cell_sum[place] += sum[lane];
      if (sum[lane] != sum[lane]) call.cell_max[place] = sum[lane];
      else if (most[lane] > call.cell_max[place]) call.cell_max[place] = most[lane];
    }
    for (int lane = 0; lane < lanes; ++lane) sum[lane] = most[lane] = 0;
  }
};

template <int W>
void forward_block(const Forward& call, Arena arena, Place here, Place next, int64_t slot) {
  Block<W> block(call, arena);
  block.batch = here.batch, block.head = here.head;
  block.source_head = block.head / (call.head / call.source_head);
  block.first = here.first, block.count = min(W * N, call.query - here.first), block.slot = slot;
  block.used = (int)((block.count + N - 1) / N);
  block.next = next;
  block.run();
}

Place place_of(const Forward& call, int64_t item) {
  const int64_t row = item / call.slots;
  return {row / call.head, row % call.head, (call.slots - 1 - item % call.slots) * kWide};
}

// Work item: every `slots`-th block of one head, the last blocks first (they see most sources).
void forward_item(const Forward& call, int64_t item, char* scratch) {
  Place here = place_of(call, item);
  const int64_t slot = here.first / kWide;
  const int64_t other = item + call.threads < call.batch * call.head * call.slots ? item + call.threads : item;
  for (Place next; here.first < call.query; here = next) {
    Arena arena{scratch};
    const int64_t left = call.query - here.first;
    next = {here.batch, here.head, here.first + call.slots * kWide};
    const Place then = next.first < call.query ? next : place_of(call, other);
    if (left > 3 * N) forward_block<Vec::wide>(call, arena, here, then, slot);
    else if (left > 2 * N) forward_block<3>(call, arena, here, then, slot);
    else if (left > N) forward_block<2>(call, arena, here, then, slot);
    else forward_block<1>(call, arena, here, then, slot);
  }
}

size_t forward_scratch(const Forward& call) {
  Arena arena{nullptr};
  Block<Vec::wide> block(call, arena);
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
