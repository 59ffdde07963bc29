// Gradients of a block of queries: weights and their gradients are recomputed tile by tile from each row's maximum and
// sum, so that nothing of size query x source is stored. After forward/parts.inl, rows.inl, sources.inl and
// reading_gradients.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int64_t kGradGroup = 8;  // sources whose scores stay in the first-level cache on their way to weights

// One block of queries against the tiles of one work item.
template <int W>
struct GradientBlock {
  static constexpr int lanes = W * N;
  SourceGrads& sources;
  const Backward& work;
  const Forward& call;
  const Queries queries;
  const bool raw, pairs;
  ReadingTerms<W> terms;
  Kept kept;
  const bool extra;  // more than the context, by way of the weights alone, depends on the scores
  Operand<W> q, grad;
  // Of a tile, [source][lane]: scores, then weights; gradients of weights, then of products; the derivative of the
  // softcap; the bias, then its gradient; and what bf16 products need of the weights and gradients.
  float *scores, *grads, *slope, *bias_tile;
  uint16_t *short_weights, *short_grads;  // [source][lane]
  uint32_t* grad_pairs;                   // [pair of sources][lane]
  float* dq;                              // [feature][lane]
  float *convert_k, *convert_v;
  // Of each row; delta = sum_j weight_j * gradient of weight_j, and shift is row_max in base 2
  float *row_max, *row_scale, *log_scale, *shift, *delta, *ones;
  bool finite;        // all of q and of the gradient of the context is
  bool small_scores;  // no score is so large that its conversion to base 2 loses digits
  Ranges ranges;
  uint64_t bits[kTile], kept_bits[kTile];
  Part parts[kTile / kGradGroup];
  int part_count;
  int64_t prefetched;  // rows

  GradientBlock(SourceGrads& sources, const Queries& queries, Arena& arena)
      : sources(sources),
        work(sources.work),
        call(work.forward),
        queries(queries),
        raw(keeps_raw_scores(call)),
        pairs(work.packed_k != nullptr),
        terms(work, this->queries, arena),
        kept(call.dropout, lanes, arena),
        extra(call.softcap != 0 || work.dbias.data || terms.any() || kept.some_dropped()),
        q(call.q, call.head_dim, pairs, arena),
        grad(work.grad_out, call.value_dim, pairs, arena) {
    scores = arena.take<float>(kTile * lanes), grads = arena.take<float>(kTile * lanes);
    slope = arena.take<float>(call.softcap != 0 ? kTile * lanes : 0);
    bias_tile = arena.take<float>(call.bias.data ? kTile * lanes : 0);
    dq = arena.take<float>(call.head_dim * lanes);
    row_max = arena.take<float>(lanes), row_scale = arena.take<float>(lanes), log_scale = arena.take<float>(lanes);
    shift = arena.take<float>(lanes), delta = arena.take<float>(lanes), ones = arena.take<float>(lanes);
    grad_pairs = arena.take<uint32_t>(pairs ? kTile / 2 * lanes : 0);
    short_weights = arena.take<uint16_t>(pairs ? kTile * lanes : 0);
    short_grads = arena.take<uint16_t>(pairs ? kTile * lanes : 0);
    convert_k = arena.take<float>(kTile * max(call.head_dim, call.value_dim));
    convert_v = arena.take<float>(kTile * call.value_dim);
  }

  // Adds the gradients of the sources, and writes dQ.
  void run() {
    ranges = ranges_of(call.mask, queries, lanes);
    load_block();
    prefetched = 0;
    const int64_t late = ranges.last - 4 * kTile * work.slots;
    each_tile(sources.slot, work.slots, [&](int64_t from, int64_t n, Tile kind) {
      if (from >= late) prefetch(lanes / 3);
      tile(from, n, kind);
    });
    write_dq();
  }

  // Adds to each row sum_j weight_j * gradient_j of the readings that are sums over queries or parts of the map, whose
  // caller cannot compute it without the weights.
  void add_row_terms() {
    ranges = ranges_of(call.mask, queries, lanes);
    load_softmax();
    load_queries();
    std::memset(delta, 0, sizeof(float) * lanes);
    each_tile(0, 1, [&](int64_t from, int64_t n, Tile kind) { add_row_terms_of(from, n, kind == Tile::partial); });
    for (int64_t lane = 0; lane < queries.count; ++lane) work.row_terms[queries.row(lane)] += delta[lane];
  }

 private:
  // Packed with the sign of the scale, so that the largest raw score has the largest weight.
  bool load_queries() {
    const bool finite_q = q.load(queries);
    if (raw && call.scale < 0) q.negate();
    return finite_q;
  }

  // The factor from scores to exponents, unless `finish_scores` has applied it
  f scale_in() const { return Vec::set1(raw ? std::fabs(call.scale) : 1.f); }

  void load_softmax() {
    small_scores = true;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      ones[lane] = 1;
      row_max[lane] = lane < queries.count ? call.row_max[queries.row(lane)] : 0;
      row_scale[lane] = lane < queries.count ? call.row_scale[queries.row(lane)] : 0;
      log_scale[lane] = extra && row_scale[lane] > 0 ? std::log(row_scale[lane]) : 0;
      shift[lane] = row_max[lane] * kLog2e;
      small_scores = small_scores && std::fabs(row_max[lane]) < 1e3f;
    }
    terms.start();
  }

  void load_block() {
    load_softmax();
    kept.start(queries.row(0), call.source, lanes);
    const bool finite_q = load_queries();
    finite = grad.load(queries) && finite_q;
    if (pairs && !finite) q.load_rows(queries), grad.load_rows(queries);
    std::memset(dq, 0, sizeof(float) * call.head_dim * lanes);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      delta[lane] = 0;
      if (lane >= queries.count) continue;
      const float own = dot_with_out(lane) + (work.row_terms ? work.row_terms[queries.row(lane)] : 0);
      delta[lane] = extra ? own : call.scale * own;
    }
  }

  float dot_with_out(int64_t lane) {
    const auto row_of = [&](const View& view, float* convert) {
      return float_rows(view, call.type, queries.batch, queries.head, queries.first + lane, 1, call.value_dim, convert)
          .data;
    };
    const float *out = row_of(call.out, convert_v), *grad = row_of(work.grad_out, convert_k);
    f sum = Vec::zero();
    int64_t i = 0;
    for (; i + N <= call.value_dim; i += N) sum = Vec::fma(Vec::load(out + i), Vec::load(grad + i), sum);
    float result = Vec::sum(sum);
    for (; i < call.value_dim; ++i) result += out[i] * grad[i];
    return result;
  }

  // Which lanes may read which source: fills `bits`, and loads the bias.
  Tile find_bits(int64_t from, int64_t n) {
    const Tile kind = tile_bits<W>(call.mask, ranges, queries, from, n, bits);
    if (!call.bias.data || kind == Tile::empty) return kind;
    load_bias<W>(queries, from, n, bias_tile);
    return block_by_bias<W>(bias_tile, n, kind, bits);
  }

  template <bool masked>
  void differentiate(float* x, float* g, int64_t s, int64_t n, bool in_pairs) const {
    if (in_pairs) differentiate_pairs<masked>(x, g, s, n);
    else differentiate_floats<masked>(x, g, n, bits + s);
  }

  // `x` where the lane may read the source, 0 elsewhere, where `x` may be anything
  template <bool masked>
  static f only(uint64_t allowed, int j, f x) {
    return masked ? Vec::select(allowed >> (j * N), x, Vec::zero()) : x;
  }

  // Scores become weights, and gradients of weights those of the products q.k; delta includes the scale.
  template <bool masked>
  void differentiate_floats(float* x, float* g, int64_t n, const uint64_t* allowed) const {
    const f scale = Vec::set1(call.scale), in = scale_in();
    for (int64_t s = 0; s < n; ++s)
      CLEARHEAD_UNROLL_FOR (int j = 0; j < W; ++j) {
        float *score = x + (s * W + j) * N, *grad = g + (s * W + j) * N;
        const f below = Vec::fms(Vec::load(score), in, Vec::load(row_max + j * N));
        const f weight = Vec::mul(exp_of(below), Vec::load(row_scale + j * N));
        const f centred = Vec::fms(Vec::load(grad), scale, Vec::load(delta + j * N));
        Vec::store(score, only<masked>(allowed[s], j, weight));
        Vec::store(grad, only<masked>(allowed[s], j, Vec::mul(weight, centred)));
      }
  }

  // The same where more than the context depends on the weights or scores. `bias_tile` receives the gradients of the
  // final scores if those of the bias are computed.
  void differentiate_extra(int64_t n) {
    const f scale = Vec::set1(call.scale), in = scale_in();
    for (int64_t i = 0; i < n * W; ++i) {
      const int j = (int)(i % W) * N;
      const f below = Vec::fms(Vec::load(scores + i * N), in, Vec::load(row_max + j));
      const f weight = Vec::mul(exp_of(below), Vec::load(row_scale + j));
      f grad = terms.with_entropy(Vec::load(grads + i * N), Vec::add(below, Vec::load(log_scale + j)), j);
      grad = Vec::mul(weight, Vec::sub(grad, Vec::load(delta + j)));
      if (work.readings.scores) grad = Vec::add(grad, Vec::load(terms.scores + i * N));
      if (work.dbias.data) Vec::store(bias_tile + i * N, grad);
      grad = Vec::mul(grad, scale);
      if (call.softcap != 0) grad = Vec::mul(grad, Vec::load(slope + i * N));
      Vec::store(scores + i * N, weight), Vec::store(grads + i * N, grad);
    }
  }

  void clear_blocked(float* g, int64_t n, const uint64_t* allowed) const {
    for (int64_t i = 0; i < n * W; ++i)
      Vec::store(g + i * N, Vec::select(allowed[i / W] >> (i % W * N), Vec::load(g + i * N), Vec::zero()));
  }

  // The context has the kept weights times a factor, and so have the gradients.
  void drop(float* tile, int64_t n) const {
    const f scale = Vec::set1(kept.scale());
    for (int64_t i = 0; i < n * W; ++i) {
      const f x = Vec::mul(Vec::load(tile + i * N), scale);
      Vec::store(tile + i * N, Vec::select(kept_bits[i / W] >> (i % W * N), x, Vec::zero()));
    }
  }

  void drop_grads(int64_t from, int64_t n) {
    for (int64_t s = 0; s < n; ++s) {
      kept_bits[s] = 0;
      for (int j = 0; j < W; ++j) kept_bits[s] |= kept.bits(j * N, from + s) << (j * N);
    }
    drop(grads, n);
  }

  Rows rows_of(const View& view, int64_t from, int64_t n, int64_t width, float* convert) const {
    if (pairs) return {nullptr, 0};
    return float_rows(view, call.type, queries.batch, queries.source_head, from, n, width, convert);
  }

  // Finds the parts of a tile that some query may read, from `bits`, or takes the tile as a whole.
  void cut(int64_t n, bool whole) {
    part_count = 0;
    if (whole) parts[part_count++] = {0, n, 0, W};
    for (int64_t s = 0; s < n && !whole; s += kGradGroup) {
      const int64_t stop = min(n, s + kGradGroup);
      uint64_t some = 0;
      for (int64_t i = s; i < stop; ++i) some |= bits[i];
      int begin = W, end = 0;
      for (int j = 0; j < W; ++j)
        if (some >> (j * N) & lane_mask(N)) begin = begin < j ? begin : j, end = j + 1;
      Part* last = part_count ? parts + part_count - 1 : nullptr;
      if (last && last->last == s && last->begin == begin && last->end == end) last->last = stop;
      else if (begin < end) parts[part_count++] = {s, stop, begin, end};
    }
  }

  // result[.][lane] = products of the sources from + s .. from + s + n with the vectors of a part
  void dot(const View& view, const Rows& rows, int64_t from, int64_t s, int64_t n, const Part& part, int64_t width,
           const float* packed, const uint32_t* packed_pairs, float* result) const {
    const int64_t lane = part.begin * N;
    with_vectors<W>(part.end - part.begin, [&](auto vectors) {
      constexpr int V = decltype(vectors)::value;
#ifdef CLEARHEAD_DOTS
      if (pairs) {
        const auto* short_rows = (const uint16_t*)at(view, call.type, queries.batch, queries.source_head, from + s);
        return dot_part<Pair, V>(short_rows, view.position, n, packed_pairs + lane, lanes, width / 2, result + lane);
      }
#endif
      (void)view, (void)from, (void)packed_pairs;
      dot_part<Single, V>(rows.data + s * rows.stride, rows.stride, n, packed + lane, lanes, width, result + lane);
    });
  }

  void tile(int64_t from, int64_t n, Tile kind) {
    const bool masked = kind == Tile::partial, selected = masked && !sources.finite_keys;
    const bool in_pairs = pairs && small_scores && finite && !(extra || selected);
    const Rows k = rows_of(call.k, from, n, call.head_dim, convert_k);
    const Rows v = rows_of(call.v, from, n, call.value_dim, convert_v);
    // What belongs to no part is blocked and never read; blocked lanes inside the parts are set to 0.
    cut(n, !masked || extra || !finite || selected);
    each_group([&](const Part& part, int64_t s, int64_t m) {
      const int64_t offset = s * lanes;
      float *x = in_pairs ? scores : scores + offset, *g = in_pairs ? grads : grads + offset;
      dot(call.k, k, from, s, m, part, call.head_dim, q.packed, q.paired.by_feature, x);
      dot(call.v, v, from, s, m, part, call.value_dim, grad.packed, grad.paired.by_feature, g);
      if (!raw || extra)
        finish_scores<W>(call, x, m, bias_tile + (call.bias.data ? offset : 0), masked ? bits + s : nullptr,
                         call.softcap != 0 ? slope + offset : nullptr);
      if (extra) return;
      if (masked) differentiate<true>(x, g, s, m, in_pairs);
      else differentiate<false>(x, g, s, m, in_pairs);
    });
    if (extra) {
      if (kept.some_dropped()) drop_grads(from, n);
      terms.add(from, n, grads);
      if (work.readings.scores) terms.load_scores(from, n);
      if (masked) clear_blocked(grads, n, bits);
      if (masked && work.readings.scores) clear_blocked(terms.scores, n, bits);
      if (masked && call.softcap != 0) clear_blocked(slope, n, bits);
      differentiate_extra(n);
      if (work.dbias.data) add_bias(from, n);
      if (kept.some_dropped()) drop(scores, n);
    }
    if (pairs && !in_pairs) round_tile(n);
    if (pairs && !selected) add_to_dq_in_pairs(from);
    else add_to_dq(from, n, selected);
    const int64_t place = sources.place(from);
    for (int p = 0; p < part_count; ++p) {
      const int64_t row = place + parts[p].first;
      float *dk = sources.dk + row * sources.key_width, *dv = sources.dv + row * sources.value_width;
      add_to_sources(parts[p], scores, short_weights, grad, sources.value_width, dv);
      add_to_sources(parts[p], grads, short_grads, q, sources.key_width, dk);
    }
  }

  // Calls handle(part, first source, number of sources) for each group of sources of each part.
  template <class Do>
  void each_group(Do handle) const {
    for (int p = 0; p < part_count; ++p)
      for (int64_t s = parts[p].first; s < parts[p].last; s += kGradGroup)
        handle(parts[p], s, min(kGradGroup, parts[p].last - s));
  }

  template <class E>
  void accumulate(const Part& part, const typename E::scalar* k, int64_t stride, int64_t n,
                  const typename E::packed* weights) {
    const int64_t lane = part.begin * N;
    with_vectors<W>(part.end - part.begin, [&](auto vectors) {
      accumulate_part<E, decltype(vectors)::value>(k, stride, n, weights + lane, lanes, ones + lane, call.head_dim,
                                                   dq + lane);
    });
  }

  void add_to_dq(int64_t from, int64_t n, bool selected) {
    const Rows k = float_rows(call.k, call.type, queries.batch, queries.source_head, from, n, call.head_dim, convert_k);
    if (selected) return accumulate_selected<W>(k.data, k.stride, n, grads, bits, ones, call.head_dim, dq);
    for (int p = 0; p < part_count; ++p) {
      const int64_t s = parts[p].first;
      accumulate<Single>(parts[p], k.data + s * k.stride, k.stride, parts[p].last - s, grads + s * lanes);
    }
  }

  // Adds to dK or dV the products of gradients or weights, and the same in bf16, with the rows of an operand.
  void add_to_sources(const Part& part, const float* weights, const uint16_t* short_weights, const Operand<W>& operand,
                      int64_t width, float* to) {
    const int64_t n = part.last - part.first, lane = part.begin * N, count = min(part.end * N, queries.count) - lane;
    const PaddedRows& rows = operand.rows;
    weights += part.first * lanes + lane;
    if (!finite) return outer_selected(weights, lanes, n, rows.data, rows.stride, queries.count, width, to);
#ifdef CLEARHEAD_DOTS
    if (pairs)
      return outer_tile<Pair>(short_weights + part.first * lanes + lane, lanes, n,
                              operand.paired.by_query + lane / 2 * width, width, (count + 1) / 2, width, to);
#endif
    (void)short_weights;
    outer_tile<Single>(weights, lanes, n, rows.data + lane * rows.stride, rows.stride, count, width, to);
  }

#ifdef CLEARHEAD_DOTS
  void add_to_dq_in_pairs(int64_t from) {
    const int64_t row = (queries.batch * call.source_head + queries.source_head) * ((call.source + 1) / 2) + from / 2;
    const auto* k = (const uint16_t*)(work.packed_k + row * call.head_dim);
    for (int p = 0; p < part_count; ++p) {
      const int64_t s = parts[p].first;
      accumulate<Pair>(parts[p], k + s * call.head_dim, 2 * call.head_dim, (parts[p].last - s + 1) / 2,
                       grad_pairs + s / 2 * lanes);
    }
  }

  // The same directly to bf16: by source, and the gradients also in pairs of sources. Scores are small, so that the
  // scale converts them to base 2.
  template <bool masked>
  void differentiate_pairs(const float* x, const float* g, int64_t s, int64_t n) const {
    const f scale = Vec::set1(call.scale), in = Vec::mul(scale_in(), Vec::set1(kLog2e));
    for (int64_t i = 0; i < n; i += 2)
      CLEARHEAD_UNROLL_FOR (int j = 0; j < W; ++j) {
        f weight[2] = {Vec::zero(), Vec::zero()}, grad[2] = {Vec::zero(), Vec::zero()};
        CLEARHEAD_UNROLL_FOR (int k = 0; k < 2; ++k) {
          if (k == 1 && i + 1 == n) continue;
          const int64_t at = ((i + k) * W + j) * N;
          const f below = Vec::fms(Vec::load(x + at), in, Vec::load(shift + j * N));
          weight[k] = Vec::mul(Vec::exp2(below), Vec::load(row_scale + j * N));
          grad[k] = Vec::mul(weight[k], Vec::fms(Vec::load(g + at), scale, Vec::load(delta + j * N)));
          weight[k] = only<masked>(bits[s + i + k], j, weight[k]), grad[k] = only<masked>(bits[s + i + k], j, grad[k]);
        }
        const int64_t low = (s + i) * lanes + j * N, high = low + lanes;
        Vec::store_bf16_rows(short_weights + low, short_weights + high, weight[0], weight[1]);
        Vec::store_bf16_rows(short_grads + low, short_grads + high, grad[0], grad[1]);
        Vec::store_pair(grad_pairs + ((s + i) / 2 * W + j) * N, grad[0], grad[1]);
      }
  }

  void round_tile(int64_t n) {
    for (int64_t s = 0; s < n; s += 2)
      for (int j = 0; j < W; ++j) {
        const int64_t low = s * lanes + j * N, high = low + lanes;
        const bool both = s + 1 < n;
        const f next = both ? Vec::load(grads + high) : Vec::zero();
        Vec::store_bf16_rows(short_weights + low, short_weights + high, Vec::load(scores + low),
                             both ? Vec::load(scores + high) : Vec::zero());
        Vec::store_bf16_rows(short_grads + low, short_grads + high, Vec::load(grads + low), next);
        Vec::store_pair(grad_pairs + (s / 2 * W + j) * N, Vec::load(grads + low), next);
      }
  }
#else
  void add_to_dq_in_pairs(int64_t) {}
  template <bool masked>
  void differentiate_pairs(const float*, const float*, int64_t, int64_t) const {}
  void round_tile(int64_t) {}
#endif

  // Adds the gradients of the scores, which `bias_tile` holds, summed over the axes that the bias broadcasts over.
  void add_bias(int64_t from, int64_t n) {
    const BiasGrad& to = work.dbias;
    float* base = to.data + sources.slot * to.slot + queries.batch * to.batch + queries.head * to.head +
                  queries.first * to.query + from * to.source;
    if (to.query) {
      for (int64_t lane = 0; lane < queries.count; ++lane)
        for (int64_t s = 0; s < n; ++s) base[lane * to.query + s * to.source] += bias_tile[s * lanes + lane];
      return;
    }
    for (int64_t s = 0; s < n; ++s) {
      f sum = Vec::load(bias_tile + s * lanes);
      for (int j = 1; j < W; ++j) sum = Vec::add(sum, Vec::load(bias_tile + (s * W + j) * N));
      base[s * to.source] += Vec::sum(sum);
    }
  }

  void write_dq() {
    float* rows = q.packed;  // no longer needed
    transpose(dq, lanes, call.head_dim, queries.count, rows, call.head_dim);
    for (int64_t lane = 0; lane < queries.count; ++lane) {
      const float* from = rows + lane * call.head_dim;
      if (!work.dq_slots) {
        write_row(work.dq, work.type, queries.batch, queries.head, queries.first + lane, from, call.head_dim);
        continue;
      }
      const int64_t row =
          ((sources.slot * call.batch + queries.batch) * call.head + queries.head) * call.query + queries.first + lane;
      std::memcpy(work.dq_slots + row * call.head_dim, from, sizeof(float) * call.head_dim);
    }
  }

  // Calls handle(first source, number of sources, kind) for every `step`-th tile from number `begin` on that some query
  // may read, cut to what the queries read.
  template <class Do>
  void each_tile(int64_t begin, int64_t step, Do handle) {
    const int64_t first_read = ranges.first & ~(int64_t)1;  // whole pairs
    const int64_t last_read = min(call.source, (ranges.last + 1) & ~(int64_t)1);
    int64_t at = begin * kTile;
    if (first_read > at) at += (first_read - at) / (kTile * step) * kTile * step;
    for (; at < last_read; at += kTile * step) {
      const int64_t from = max(at, first_read), n = min(at + kTile, last_read) - from;
      if (n <= 0) continue;
      const Tile kind = find_bits(from, n);
      if (kind != Tile::empty) handle(from, n, kind);
    }
  }

  // Prefetches some of the rows that this block will write and that the next one will read.
  void prefetch(int64_t rows) {
    for (const int64_t stop = min(lanes, prefetched + rows); prefetched < stop; ++prefetched) {
      const int64_t here = queries.first + prefetched, next = here + queries.count;
      if (prefetched < queries.count && !work.dq_slots)
        prefetch_row<1>(work.dq, work.type, queries.batch, queries.head, here, call.head_dim);
      if (next >= call.query) continue;
      prefetch_row<0>(call.q, call.type, queries.batch, queries.head, next, call.head_dim);
      prefetch_row<0>(call.out, call.type, queries.batch, queries.head, next, call.value_dim);
      prefetch_row<0>(work.grad_out, call.type, queries.batch, queries.head, next, call.value_dim);
    }
  }

  void add_row_terms_of(int64_t from, int64_t n, bool masked) {
    const Rows k = rows_of(call.k, from, n, call.head_dim, convert_k);
    dot(call.k, k, from, 0, n, {0, n, 0, W}, call.head_dim, q.packed, q.paired.by_feature, scores);
    if (!raw || masked) finish_scores<W>(call, scores, n, bias_tile, masked ? bits : nullptr, nullptr);
    std::memset(grads, 0, sizeof(float) * n * lanes);
    terms.add_sums(from, n, grads);
    if (masked) clear_blocked(grads, n, bits);
    const f scale = scale_in();
    for (int j = 0; j < W; ++j) {
      f sum = Vec::zero();
      for (int64_t s = 0; s < n; ++s) {
        const f below = Vec::fms(Vec::load(scores + (s * W + j) * N), scale, Vec::load(row_max + j * N));
        sum = Vec::fma(exp_of(below), Vec::load(grads + (s * W + j) * N), sum);
      }
      float* place = delta + j * N;
      Vec::store(place, Vec::fma(sum, Vec::load(row_scale + j * N), Vec::load(place)));
    }
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
