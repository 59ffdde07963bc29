// The forward: one block of queries against its tiles of sources, and what is read on the way.
// After scores.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

bool uses_pairs(const Forward& call) { return Vec::has_dots && call.type == Type::bf16 && call.head_dim % 2 == 0; }
bool keeps_strip(const Forward& call) {
  return call.received || call.cell_sum || call.distance || call.mass || call.rows;
}
template <int W>
struct Block {
  static constexpr int lanes = W * N;
  const Forward& call;
  int64_t batch, head, source_head, first, count, slot;
  bool pairs, strip, plain;

  float *packed, *scores, *out, *row_max, *row_sum, *rescale, *neg_entropy, *convert;
  uint32_t *packed_pairs, *weight_pairs;
  float *tile_max, *top_scores, *bias_tile, *top_sources;  // sources are int32, moved about as floats
  Ranges ranges;
  int64_t* tile_first;
  int64_t* tile_count;
  uint64_t bits[kTile];
  int64_t tiles = 0, top_rows;

  Block(const Forward& call, Arena& arena) : call(call) {
    pairs = uses_pairs(call), strip = keeps_strip(call), plain = is_plain(call);
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
    if (pairs) pack_query_pairs();
    const float sink = call.sinks ? call.sinks[head] : 0;
    for (int lane = 0; lane < lanes; ++lane) {
      row_max[lane] = call.sinks && sink > -FLT_MAX ? sink : -FLT_MAX;
      row_sum[lane] = !call.sinks || sink == -INFINITY ? 0 : sink != sink ? sink : 1;
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

  // Softmax of one tile against the running maximum; scores become unnormalised weights in place.
  template <bool entropy>
  void soften(float* tile, int64_t n) {
    const f scale = Vec::set1(plain ? std::fabs(call.scale) : 1.f);
    f old_max[W], now[W], sum[W], spread[W], before[W];
    for (int j = 0; j < W; ++j) now[j] = Vec::set1(-INFINITY);
    for (int64_t s = 0; s < n; ++s)
      for (int j = 0; j < W; ++j) now[j] = Vec::max(Vec::load(tile + (s * W + j) * N), now[j]);
    if (call.top) gather_top(tile, n, now);
    for (int j = 0; j < W; ++j) {
      old_max[j] = Vec::load(row_max + j * N);
      now[j] = Vec::max(Vec::mul(now[j], scale), old_max[j]);
      const f drop = Vec::sub(old_max[j], now[j]);
      const f shrink = exp_of(drop);
      sum[j] = Vec::zero();
      if (entropy) {
        const f moved = Vec::fma(Vec::max(Vec::set1(-1000.f), drop), Vec::load(row_sum + j * N), Vec::load(neg_entropy + j * N));
        before[j] = Vec::mul(moved, shrink), spread[j] = Vec::zero();
      }
      Vec::store(rescale + j * N, shrink), Vec::store(row_max + j * N, now[j]);
    }
    for (int64_t s = 0; s < n; ++s)
      for (int j = 0; j < W; ++j) {
        float* place = tile + (s * W + j) * N;
        const f below = Vec::fms(Vec::load(place), scale, now[j]);
        const f weight = exp_of(below);
        sum[j] = Vec::add(sum[j], weight);
        if (entropy) spread[j] = Vec::fma(weight, Vec::max(Vec::set1(-1000.f), below), spread[j]);
        Vec::store(place, weight);
      }
    for (int j = 0; j < W; ++j) {
      Vec::store(row_sum + j * N, Vec::fma(Vec::load(row_sum + j * N), Vec::load(rescale + j * N), sum[j]));
      if (entropy) Vec::store(neg_entropy + j * N, Vec::add(before[j], spread[j]));
    }
  }

  // The running top list of each lane, kept sorted; a tile whose maximum is no news costs one
  // compare. Short lists are moved about in registers.
  void gather_top(const float* tile, int64_t n, const f* tile_best) {
    const float* worst = top_scores + (top_rows - 1) * lanes;
    for (int j = 0; j < W; ++j) {
      if (!Vec::greater(tile_best[j], Vec::load(worst + j * N))) continue;
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

  void tile(int64_t from, int64_t n, Tile kind) {
    float* here = strip ? scores + tiles * kTile * lanes : scores;
    tile_begin = from;
    if (pairs) {
      dot_pairs(here, from, n);
    } else {
      const Rows k = float_rows(call.k, call.type, batch, source_head, from, n, call.head_dim, convert);
      dot_tile<Single, W>(k.data, k.stride, n, packed, call.head_dim, here);
    }
    if (!plain || kind == Tile::partial)
      edit<W>(call, here, n, bias_tile, kind == Tile::partial ? bits : nullptr, nullptr);
    if (call.entropy) soften<true>(here, n); else soften<false>(here, n);
    mix(here, from, n, kind);
    if (strip) {
      std::memcpy(tile_max + tiles * lanes, row_max, sizeof(float) * lanes);
      tile_first[tiles] = from, tile_count[tiles] = n;
      ++tiles;
    }
  }

  void mix(const float* weights, int64_t from, int64_t n, Tile kind) {
    if (kind == Tile::partial) {
      const Rows v = float_rows(call.v, call.type, batch, source_head, from, n, call.value_dim, convert);
      if (!all_finite<W>(v, n, call.value_dim)) return mix_selected<W>(v.data, v.stride, n, weights, bits, rescale, call.value_dim, out);
      if (!pairs) return mix_tile<Single, W>(v.data, v.stride, n, weights, rescale, call.value_dim, out);
    }
    if (pairs) return mix_pairs(weights, from, n);
    const Rows v = float_rows(call.v, call.type, batch, source_head, from, n, call.value_dim, convert);
    mix_tile<Single, W>(v.data, v.stride, n, weights, rescale, call.value_dim, out);
  }

#ifdef CLEARHEAD_DOTS
  void dot_pairs(float* here, int64_t from, int64_t n) {
    const auto* k = (const uint16_t*)at(call.k, call.type, batch, source_head, from);
    dot_tile<Pair, W>(k, call.k.position, n, packed_pairs, call.head_dim / 2, here);
  }

  void mix_pairs(const float* weights, int64_t from, int64_t n) {
    const int64_t half = (n + 1) / 2;
    for (int64_t s = 0; s < half; ++s)
      for (int j = 0; j < W; ++j) {
        const f low = Vec::load(weights + (2 * s * W + j) * N);
        const f high = 2 * s + 1 < n ? Vec::load(weights + ((2 * s + 1) * W + j) * N) : Vec::zero();
        Vec::store_pair(weight_pairs + (s * W + j) * N, low, high);
      }
    const int64_t pairs_of_sources = (call.source + 1) / 2;
    const uint32_t* v = call.packed_v + ((batch * call.source_head + source_head) * pairs_of_sources + from / 2) * call.value_dim;
    mix_tile<Pair, W>((const uint16_t*)v, 2 * call.value_dim, half, weight_pairs, rescale, call.value_dim, out);
  }
#else
  void dot_pairs(float*, int64_t, int64_t) {}
  void mix_pairs(const float*, int64_t, int64_t) {}
#endif

  void run() {
    start();
    ranges = ranges_of(call.mask, batch, head, first, count, lanes, call.source);
    const int64_t last = min(call.source, (ranges.last + 1) & ~(int64_t)1);  // whole pairs
    for (int64_t from = ranges.first & ~(int64_t)7; from < last; from += kTile) {
      const int64_t n = min(kTile, last - from);
      const Tile kind = allow(from, n, bits);
      if (kind != Tile::empty) tile(from, n, kind);
    }
    finish();
  }

  void finish() {
    for (int lane = 0; lane < lanes; ++lane) rescale[lane] = row_sum[lane] == 0 ? 0 : 1 / row_sum[lane];
    if (call.out.data) write_context();
    if (call.odd && is_odd()) call.odd->store(true, std::memory_order_relaxed);
    if (call.lse || call.row_max || call.entropy || call.top) write_statistics();
    if (strip) weigh();
  }

  // `out` is final by now.
  bool is_odd() const {
    uint64_t bad = 0;
    for (int64_t i = 0; i < call.value_dim * W; ++i) bad |= Vec::not_finite(Vec::load(out + i * N));
    for (int64_t lane = 0; lane < count; ++lane) {
      bool seen = !ranges.count;
      for (int64_t r = 0; r < ranges.count; ++r) seen |= ranges.all[r].start[lane] < ranges.all[r].stop[lane];
      bad |= is_odd_row(call, row_max[lane], row_sum[lane], seen && !call.mask.bytes && !call.bias.data);
    }
    return bad;
  }

  void write_context() {
    for (int64_t i = 0; i < call.value_dim * W; ++i) {
      const f scale = Vec::load(rescale + i % W * N);
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
      const float lse = empty ? -INFINITY : row_max[lane] + log_sum;
      if (call.lse) call.lse[row(lane)] = lse;
      if (call.row_max) call.row_max[row(lane)] = empty ? 0 : row_max[lane], call.row_scale[row(lane)] = rescale[lane];
      if (call.entropy) {
        // the sink counts in the denominator, and is no source
        const float below = call.sinks ? call.sinks[head] - row_max[lane] : -INFINITY, sink = std::exp(below);
        const float spread = neg_entropy[lane] - (sink > 0 ? sink * below : 0);
        call.entropy[row(lane)] = empty ? 0 : (log_sum * (row_sum[lane] - sink) - spread) * rescale[lane];
      }
      if (call.top && row_sum[lane] != row_sum[lane]) first_as_top(lane);
    }
    if (call.top) write_top();
  }

  void write_top() {
    const f scale = Vec::set1(plain ? std::fabs(call.scale) : 1.f);
    for (int64_t k = 0; k < call.top; ++k) {
      float weight[lanes];
      for (int j = 0; j < W; ++j) {
        const f below = Vec::fms(Vec::load(top_scores + k * lanes + j * N), scale, Vec::load(row_max + j * N));
        Vec::store(weight + j * N, Vec::mul(exp_of(below), Vec::load(rescale + j * N)));  // NaN in a poisoned row
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
        const f shift = exp_of(Vec::sub(Vec::load(tile_max + t * lanes + j * N), Vec::load(row_max + j * N)));
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
    alignas(64) float partial[kTile * N];
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
        if (received) Vec::store(partial + s * N, across);
      }
      for (int j = 0; cells && j < W; ++j) Vec::store(sum + j * N, total[j]), Vec::store(most + j * N, best[j]);
    }
    for (s = 0; received && s + N <= tile_count[t]; s += N)
      Vec::store(to + s, Vec::add(Vec::load(to + s), Vec::sum_each(partial + s * N)));
    for (; received && s < tile_count[t]; ++s) to[s] += Vec::sum(Vec::load(partial + s * N));
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
void forward_block(const Forward& call, Arena arena, int64_t item, int64_t first, int64_t slot) {
  Block<W> block(call, arena);
  const int64_t row = item / call.slots;
  block.batch = row / call.head, block.head = row % call.head;
  block.source_head = block.head / (call.head / call.source_head);
  block.first = first, block.count = min(W * N, call.query - first), block.slot = slot;
  block.run();
}

// Work item: every `slots`-th block of one head, the last blocks first (they see most sources).
void forward_item(const Forward& call, int64_t item, char* scratch) {
  const int64_t slot = call.slots - 1 - item % call.slots;
  const int64_t blocks = (call.query + kMaxLanes - 1) / kMaxLanes;
  for (int64_t b = slot; b < blocks; b += call.slots) {
    const int64_t first = b * kMaxLanes, left = call.query - first;
    Arena arena{scratch};
    if (left > 2 * N) forward_block<3>(call, arena, item, first, slot);
    else if (left > N) forward_block<2>(call, arena, item, first, slot);
    else forward_block<1>(call, arena, item, first, slot);
  }
}

size_t forward_scratch(const Forward& call) {
  Arena arena{nullptr};
  Block<Vec::vectors> block(call, arena);
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
