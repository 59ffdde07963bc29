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

template <int W>
struct Block {
  static constexpr int lanes = W * N;
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
  static constexpr int64_t kGroup = 4;  // sources that are worked on or left out together
  uint32_t whole[kTile / kGroup];       // vectors of which every lane may read the whole group
  Part parts[kTile / kGroup];
  int part_count;
  bool out_of_range = false, some_blocked = false, careful = false;
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
    pack_floats(call.q, call.type, batch, head, first, count, lanes, call.head_dim, sign, convert, packed);
    expected = 0;
    if (pairs) pack_query_pairs();
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
    std::memset(out, 0, sizeof(float) * call.value_dim * lanes);
    for (int64_t i = 0; i < top_rows * lanes; ++i) top_scores[i] = -INFINITY;
    std::memset(top_sources, 0xff, sizeof(float) * top_rows * lanes);  // -1
    tiles = 0;
  }

  void pack_query_pairs() {
    for (int64_t i = 0; i < call.head_dim / 2; ++i)
      for (int lane = 0; lane < lanes; ++lane) {
        uint32_t low, high;
        std::memcpy(&low, packed + 2 * i * lanes + lane, 4), std::memcpy(&high, packed + (2 * i + 1) * lanes + lane, 4);
        packed_pairs[i * lanes + lane] = (low >> 16) | (high & 0xffff0000);
      }
  }

  // Which lanes may read which source: by the mask, and where a bias is not -inf.
  Tile allow(int64_t from, int64_t n, uint64_t* allowed) {
    const Tile kind = tile_bits<W>(call.mask, ranges, batch, head, first, count, from, n, allowed);
    if (!call.bias.data || kind == Tile::empty) return kind;
    load_bias<W>(call.bias, batch, head, first, count, from, n, bias_tile);
    return block_by_bias<W>(bias_tile, n, kind, allowed);
  }

  // Finds the parts of a tile that some query may read, from `bits`.
  void cut(int64_t n, Tile kind) {
    part_count = 0;
    if (kind == Tile::full) parts[part_count++] = {0, n, 0, W};
    for (int64_t s = 0; s < n && kind != Tile::full; s += kGroup) {
      uint64_t some = 0, all = ~0ull;
      for (int64_t i = s; i < min(n, s + kGroup); ++i) some |= bits[i], all &= bits[i];
      int begin = W, end = 0;
      uint32_t& full = whole[s / kGroup] = 0;
      for (int j = 0; j < W; ++j) {
        if (some >> (j * N) & lane_mask(N)) begin = begin < j ? begin : j, end = j + 1;
        if ((all >> (j * N) & lane_mask(N)) == lane_mask(N)) full |= 1u << j;
      }
      const int64_t stop = min(n, s + kGroup);
      Part* last = part_count ? parts + part_count - 1 : nullptr;
      if (last && last->last == s && last->begin == begin && last->end == end) last->last = stop;
      else if (begin < end) parts[part_count++] = {s, stop, begin, end};
    }
  }

  // Scores that are plain products where some are blocked
  void block(float* tile) {
    const f blocked = Vec::set1(-INFINITY);
    for (int p = 0; p < part_count; ++p)
      for (int64_t s = parts[p].first; s < parts[p].last; ++s)
        for (int j = parts[p].begin; j < parts[p].end; ++j) {
          if (whole[s / kGroup] >> j & 1) continue;
          float* place = tile + (s * W + j) * N;
          Vec::store(place, Vec::select(bits[s] >> (j * N), Vec::load(place), blocked));
        }
  }

  // What no part holds, where a reading looks at it all the same
  void fill_rest(float* tile, int64_t n, float value) {
    int64_t done = 0;
    auto fill = [&](int64_t first, int64_t last, int begin, int end) {
      for (int64_t s = first; s < last; ++s)
        for (int j = begin; j < end; ++j) Vec::store(tile + (s * W + j) * N, Vec::set1(value));
    };
    for (int p = 0; p < part_count; done = parts[p++].last) {
      fill(done, parts[p].first, 0, W);
      fill(parts[p].first, parts[p].last, 0, parts[p].begin), fill(parts[p].first, parts[p].last, parts[p].end, W);
    }
    fill(done, n, 0, W);
  }

  template <int V>
  static void find_most(const float* tile, int64_t n, float* most) {
    f now[V];
    CLEARHEAD_UNROLL for (int j = 0; j < V; ++j) now[j] = Vec::load(most + j * N);
    for (int64_t s = 0; s < n; ++s, tile += lanes)
      CLEARHEAD_UNROLL for (int j = 0; j < V; ++j) now[j] = Vec::max(Vec::load(tile + j * N), now[j]);
    CLEARHEAD_UNROLL for (int j = 0; j < V; ++j) Vec::store(most + j * N, now[j]);
  }

  template <int V, bool entropy, bool two>
  static void find_weights(float* tile, int64_t n, float unit, const float* most, float* total, float* spread) {
    const f factor = Vec::set1(unit);
    f now[V], sum[V], more[V];
    CLEARHEAD_UNROLL for (int j = 0; j < V; ++j) {
      now[j] = Vec::load(most + j * N), sum[j] = Vec::load(total + j * N);
      if (entropy) more[j] = Vec::load(spread + j * N);
    }
    for (int64_t s = 0; s < n; ++s, tile += lanes)
      CLEARHEAD_UNROLL for (int j = 0; j < V; ++j) {
        const f below = Vec::fms(Vec::load(tile + j * N), factor, now[j]);
        const f weight = two ? Vec::exp2(below) : exp_of(below);
        sum[j] = Vec::add(sum[j], weight);
        if (entropy) more[j] = Vec::fma(weight, Vec::max(Vec::set1(-1000.f), below), more[j]);
        Vec::store(tile + j * N, weight);
      }
    CLEARHEAD_UNROLL for (int j = 0; j < V; ++j) {
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
      with_vectors<W>(parts[p].end - parts[p].begin, [&](auto vectors) {
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
        const f moved = Vec::fma(Vec::max(Vec::set1(-1000.f), drop), Vec::load(row_sum + at), Vec::load(neg_entropy + at));
        Vec::store(neg_entropy + at, Vec::mul(moved, shrink));
      }
      Vec::store(rescale + at, shrink), Vec::store(row_max + at, now);
    }
    for (int p = 0; p < part_count; ++p)
      with_vectors<W>(parts[p].end - parts[p].begin, [&](auto vectors) {
        const int at = parts[p].begin * N;
        float* first = tile + parts[p].first * lanes + at;
        const int64_t count = parts[p].last - parts[p].first;
        if (base_two) find_weights<vectors, entropy, true>(first, count, unit, row_max + at, sum + at, spread + at);
        else find_weights<vectors, entropy, false>(first, count, unit, row_max + at, sum + at, spread + at);
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
      CLEARHEAD_UNROLL for (int k = 0; k < kShortTop; ++k) {
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
  int64_t expected;

  // Asks for some rows that this block will write and the next one read: waiting for them at the
  // ends of a block, one cache miss after the other, would take as long as half a tile.
  void expect(int64_t rows) {
    for (const int64_t stop = min(2 * lanes, expected + rows); expected < stop; ++expected) {
      const int64_t row = expected % lanes;
      if (expected < lanes && call.out.data && row < count)
        expect_row<1>(call.out, call.type, batch, head, first + row, call.value_dim);
      else if (expected >= lanes && next.first + row < call.query)
        expect_row<0>(call.q, call.type, next.batch, next.head, next.first + row, call.head_dim);
    }
  }

  void tile(int64_t from, int64_t n, Tile kind) {
    float* here = strip ? scores + tiles * kTile * lanes : scores;
    tile_begin = from;
    cut(n, kind);
    dot(here, from, n);
    if (!plain) edit<W>(call, here, n, bias_tile, kind == Tile::partial ? bits : nullptr, nullptr);
    else if (kind == Tile::partial) block(here);
    const bool rest = kind == Tile::partial && (strip || call.top);
    if (rest) fill_rest(here, n, -INFINITY);
    if (call.entropy) soften<true>(here, n); else soften<false>(here, n);
    mix(kept.some_dropped() ? drop(here, from) : here, from, n, kind);
    if (rest) fill_rest(here, n, 0);
    if (strip) {
      std::memcpy(tile_max + tiles * lanes, row_max, sizeof(float) * lanes);
      tile_first[tiles] = from, tile_count[tiles] = n;
      ++tiles;
    }
  }

  // What is read are the weights before dropout; what is mixed are these, which the scale is still to come to.
  const float* drop(const float* weights, int64_t from) {
    for (int p = 0; p < part_count; ++p)
      for (int64_t s = parts[p].first; s < parts[p].last; ++s)
        for (int j = parts[p].begin; j < parts[p].end; ++j) {
          const int64_t place = (s * W + j) * N;
          Vec::store(kept_weights + place, Vec::select(kept.bits(j * N, from + s), Vec::load(weights + place), Vec::zero()));
        }
    return kept_weights;
  }

  void dot(float* here, int64_t from, int64_t n) {
    if (pairs) return dot_pairs(here, from);
    const Rows k = float_rows(call.k, call.type, batch, source_head, from, n, call.head_dim, convert);
    dot_parts<Single>(k.data, k.stride, packed, call.head_dim, here);
  }

  template <class E>
  void dot_parts(const typename E::scalar* rows, int64_t stride, const typename E::packed* queries, int64_t depth, float* here) {
    for (int p = 0; p < part_count; ++p)
      with_vectors<W>(parts[p].end - parts[p].begin, [&](auto vectors) {
        const int64_t first = parts[p].first, at = parts[p].begin * N;
        dot_part<E, vectors>(rows + first * stride, stride, parts[p].last - first, queries + at, lanes, depth, here + first * lanes + at);
      });
  }

  // Each vector's context is rescaled with the first part that adds to it.
  template <class E>
  void mix_parts(const typename E::scalar* values, int64_t stride, const typename E::packed* weights,
                 const uint64_t* allowed = nullptr) {
    alignas(64) float factor[lanes];
    std::memcpy(factor, rescale, sizeof factor);
    for (int p = 0; p < part_count; ++p)
      with_vectors<W>(parts[p].end - parts[p].begin, [&](auto vectors) {
        const int64_t first = parts[p].first / E::step, last = (parts[p].last + E::step - 1) / E::step, at = parts[p].begin * N;
        if constexpr (E::step == 1)
          if (allowed)
            mix_selected_part(values + first * stride, stride, last - first, weights + first * lanes + at, lanes, vectors,
                              allowed + first, parts[p].begin, factor + at, call.value_dim, out + at);
        if (!allowed)
          mix_part<E, vectors>(values + first * stride, stride, last - first, weights + first * lanes + at, lanes,
                               factor + at, call.value_dim, out + at);
        for (int64_t lane = at; lane < parts[p].end * N; ++lane) factor[lane] = 1;
      });
  }

  void mix(const float* weights, int64_t from, int64_t n, Tile kind) {
    const bool select = careful && kind == Tile::partial;
    if (pairs && !select) return mix_pairs(weights, from, n);
    const Rows v = float_rows(call.v, call.type, batch, source_head, from, n, call.value_dim, convert);
    const bool finite = !select || all_finite<W>(v, n, call.value_dim);
    if (pairs && finite) return mix_pairs(weights, from, n);
    mix_parts<Single>(v.data, v.stride, weights, finite ? nullptr : bits);
  }

#ifdef CLEARHEAD_DOTS
  void dot_pairs(float* here, int64_t from) {
    const auto* k = (const uint16_t*)at(call.k, call.type, batch, source_head, from);
    dot_parts<Pair>(k, call.k.position, packed_pairs, call.head_dim / 2, here);
  }

  void mix_pairs(const float* weights, int64_t from, int64_t n) {
    for (int p = 0; p < part_count; ++p)
      for (int64_t s = parts[p].first; s < parts[p].last; s += 2)
        for (int j = parts[p].begin; j < parts[p].end; ++j) {
          const f low = Vec::load(weights + (s * W + j) * N);
          const f high = s + 1 < n ? Vec::load(weights + ((s + 1) * W + j) * N) : Vec::zero();
          Vec::store_pair(weight_pairs + (s / 2 * W + j) * N, low, high);
        }
    const int64_t pairs_of_sources = (call.source + 1) / 2;
    const uint32_t* v = call.packed_v + ((batch * call.source_head + source_head) * pairs_of_sources + from / 2) * call.value_dim;
    mix_parts<Pair>((const uint16_t*)v, 2 * call.value_dim, weight_pairs);
  }
#else
  void dot_pairs(float*, int64_t) {}
  void mix_pairs(const float*, int64_t, int64_t) {}
#endif

  void run() {
    ranges = ranges_of(call.mask, batch, head, first, count, lanes, call.source);
    read_tiles();
    if (spoiled() && some_blocked) careful = true, read_tiles();
    finish();
  }

  // A value that is not finite spoils the rows that may not read it too, by 0 * NaN.
  bool spoiled() const {
    uint64_t bad = 0;
    for (int64_t i = 0; i < call.value_dim * W; ++i) bad |= Vec::not_finite(Vec::load(out + i * N));
    return bad;
  }

  void read_tiles() {
    start();
    const int64_t last = min(call.source, (ranges.last + 1) & ~(int64_t)1);  // whole pairs
    const int64_t begin = ranges.first & ~(int64_t)7;
    const int64_t late = max(begin, last - 4 * kTile), rows_a_tile = 2 * lanes * kTile / max(1, last - late) + 1;
    for (int64_t from = begin; from < last; from += kTile) {
      if (from >= late) expect(rows_a_tile);
      const int64_t n = min(kTile, last - from);
      const Tile kind = allow(from, n, bits);
      if (kind != Tile::empty) tile(from, n, kind);
      some_blocked |= kind == Tile::partial;
    }
  }

  void finish() {
    if (call.odd && is_odd()) call.odd->store(true, std::memory_order_relaxed);
    for (int lane = 0; lane < lanes; ++lane) rescale[lane] = row_sum[lane] == 0 ? 0 : 1 / row_sum[lane];
    if (call.out.data) write_context();
    if (call.lse || call.row_max || call.entropy || call.top) write_statistics();
    if (strip) weigh();
  }

  bool is_odd() const {
    bool bad = out_of_range || spoiled();
    for (int64_t lane = 0; lane < count; ++lane) {
      bool seen = !ranges.count;
      for (int64_t r = 0; r < ranges.count; ++r) seen |= ranges.all[r].start[lane] < ranges.all[r].stop[lane];
      bad |= is_odd_row(call, (float)(row_max[lane] * natural), row_sum[lane], seen && !call.mask.bytes && !call.bias.data);
    }
    return bad;
  }

  void write_context() {
    for (int64_t i = 0; i < call.value_dim * W; ++i) {
      const f scale = Vec::mul(Vec::load(rescale + i % W * N), Vec::set1(kept.scale()));
      Vec::store(out + i * N, Vec::mul(Vec::load(out + i * N), scale));
    }
    const bool direct = call.type == Type::f32;
    float* rows = direct ? (float*)at(call.out, call.type, batch, head, first) : packed;  // packed has served
    const int64_t stride = direct ? call.out.position : call.value_dim;
    transpose(out, lanes, call.value_dim, count, rows, stride);
    for (int64_t lane = 0; lane < count; ++lane) {
      float* row = rows + lane * stride;
      if (row_sum[lane] == 0) std::memset(row, 0, sizeof(float) * call.value_dim);
      if (direct) continue;
      auto* to = (uint16_t*)at(call.out, call.type, batch, head, first + lane);
      to_halves(row, call.value_dim, call.type, to);
    }
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
        const f below = Vec::fms(Vec::load(top_scores + k * lanes + j * N), Vec::set1(unit), Vec::load(row_max + j * N));
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
    float* to = received ? call.received + ((slot * call.batch + batch) * call.head + head) * call.source + tile_first[t] : nullptr;
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
    const Tile kind = tile_bits<W>(call.mass_edges, ranges, batch, head, first, count, tile_first[t], tile_count[t], edges);
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
