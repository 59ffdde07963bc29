// Gradients: weights and their gradients are computed again tile by tile from each row's maximum and sum, so
// that nothing of size query x source is kept. A work item owns some tiles of sources (their rows of dK and
// dV are its own), and adds its share of dQ to a slot of its own. After changes.inl and outer.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int64_t kGroup = 8;  // sources whose scores stay in the first cache on their way to weights

void write_row(const View& view, Type type, int64_t batch, int64_t head, int64_t position, const float* row,
               int64_t width) {
  auto* to = (char*)at(view, type, batch, head, position);
  if (type == Type::f32) std::memcpy(to, row, sizeof(float) * width);
  else to_halves(row, width, type, (uint16_t*)to);
}

// The sources of a work item: every `slots`-th tile of one source head, with the sums of their dK and dV.
struct Share {
  const Backward& work;
  const Forward& call;
  int64_t slot, batch = 0, source_head = 0, key_width, value_width, size;
  float *own_dk, *own_dv, *dk, *dv, *rows;
  bool finite_keys = true, direct = false;

  Share(const Backward& work, int64_t slot, Arena& arena) : work(work), call(work.forward), slot(slot) {
    const int64_t tiles = (call.source + kTile - 1) / kTile;
    key_width = padded(call.head_dim), value_width = padded(call.value_dim);
    size = (tiles + work.slots - 1) / work.slots * kTile;
    own_dk = arena.take<float>(size * key_width), own_dv = arena.take<float>(size * value_width);
    rows = arena.take<float>(kTile * call.head_dim);
  }

  int64_t place(int64_t source) const { return source / kTile / work.slots * kTile + source % kTile; }

  // Handles the first source and the number of sources of each tile.
  template <class Do>
  void each_tile(Do handle) {
    for (int64_t from = slot * kTile; from < call.source; from += kTile * work.slots)
      handle(from, min(kTile, call.source - from));
  }

  // Rows in fp32 that fill whole vectors and lie side by side are added up where they go.
  bool lies_flat(const View& to, int64_t width) const {
    return work.slots == 1 && work.type == Type::f32 && width % N == 0 && to.position == width;
  }

  void start() {
    direct = lies_flat(work.dk, call.head_dim) && lies_flat(work.dv, call.value_dim);
    dk = direct ? (float*)at(work.dk, work.type, batch, source_head, 0) : own_dk;
    dv = direct ? (float*)at(work.dv, work.type, batch, source_head, 0) : own_dv;
    const int64_t rows_all = direct ? call.source : size;
    std::memset(dk, 0, sizeof(float) * rows_all * key_width),
        std::memset(dv, 0, sizeof(float) * rows_all * value_width);
    finite_keys = true;
    if (!call.mask.start && !call.mask.bytes && !call.bias.data) return;  // nothing is blocked
    each_tile([&](int64_t from, int64_t n) {
      const Rows keys = float_rows(call.k, call.type, batch, source_head, from, n, call.head_dim, rows);
      finite_keys = finite_keys && all_finite<1>(keys, n, call.head_dim);
    });
  }

  void finish() {
    if (direct) return;
    each_tile([&](int64_t from, int64_t n) {
      const float *k = dk + place(from) * key_width, *v = dv + place(from) * value_width;
      for (int64_t s = 0; s < n; ++s) {
        write_row(work.dk, work.type, batch, source_head, from + s, k + s * key_width, call.head_dim);
        write_row(work.dv, work.type, batch, source_head, from + s, v + s * value_width, call.value_dim);
      }
    });
  }
};

// One block of queries against tiles of sources.
template <int W>
struct Gradient {
  static constexpr int lanes = W * N;
  Share& share;
  const Backward& work;
  const Forward& call;
  int64_t head, first, count;
  float *packed_q, *packed_grad, *scores, *grads, *slope, *bias_tile, *dq, *convert_k, *convert_v;
  float *row_max, *row_scale, *log_scale, *shift, *delta, *ones;
  Padded rows_q, rows_grad;
  Paired pairs_q, pairs_grad;
  uint32_t* grad_pairs;
  uint16_t *short_weights, *short_grads;
  Changes<W> changes;
  Kept kept;
  uint64_t kept_bits[kTile];
  bool plain, pairs, odd, more, close;
  Ranges ranges;
  uint64_t bits[kTile];
  Part parts[kTile / kGroup];
  int part_count;
  int64_t expected;  // rows asked for ahead

  Gradient(Share& share, Arena arena)
      : share(share), work(share.work), call(work.forward), changes(work, arena), kept(call.dropout, lanes, arena) {
    plain = is_plain(call), pairs = work.packed_k != nullptr;
    more = call.softcap != 0 || work.dbias.data || changes.any() || kept.some_dropped();
    packed_q = arena.take<float>(call.head_dim * lanes), packed_grad = arena.take<float>(call.value_dim * lanes);
    rows_q.own = arena.take<float>(share.key_width * lanes),
    rows_grad.own = arena.take<float>(share.value_width * lanes);
    scores = arena.take<float>(kTile * lanes), grads = arena.take<float>(kTile * lanes);
    slope = arena.take<float>(call.softcap != 0 ? kTile * lanes : 0);
    bias_tile = arena.take<float>(call.bias.data ? kTile * lanes : 0);
    dq = arena.take<float>(call.head_dim * lanes);
    row_max = arena.take<float>(lanes), row_scale = arena.take<float>(lanes), log_scale = arena.take<float>(lanes);
    shift = arena.take<float>(lanes);
    delta = arena.take<float>(lanes), ones = arena.take<float>(lanes);
    pairs_q.take(arena, lanes, call.head_dim, pairs), pairs_grad.take(arena, lanes, call.value_dim, pairs);
    grad_pairs = arena.take<uint32_t>(pairs ? kTile / 2 * lanes : 0);
    short_weights = arena.take<uint16_t>(pairs ? kTile * lanes : 0);
    short_grads = arena.take<uint16_t>(pairs ? kTile * lanes : 0);
    convert_k = arena.take<float>(kTile * max(call.head_dim, call.value_dim)),
    convert_v = arena.take<float>(kTile * call.value_dim);
    used = arena.used;
  }
  size_t used;

  int64_t row(int64_t lane) const {
    return (share.batch * call.head + head) * call.query_total + call.first_query + first + lane;
  }

  // False where a number is not finite: then the rows are there in fp32 too.
  bool load_rows(const View& view, int64_t width, Padded& rows, float* packed, Paired& paired) {
    if (pairs && paired.load(view, share.batch, head, first, count, lanes, width)) return true;
    rows.load(view, call.type, share.batch, head, first, count, lanes, width);
    if (pairs) return false;
    transpose(rows.data, rows.stride, count, width, packed, lanes);
    for (int64_t i = 0; i < width && count < lanes; ++i)
      for (int64_t lane = count; lane < lanes; ++lane) packed[i * lanes + lane] = 0;
    return all_finite<1>({rows.data, rows.stride}, count, width);
  }

  // Packed with the sign of the scale, so that a blocked score stays the lowest.
  bool load_queries() {
    const bool finite = load_rows(call.q, call.head_dim, rows_q, packed_q, pairs_q);
    if (!plain || call.scale > 0) return finite;
    for (int64_t i = 0; !pairs && i < call.head_dim * lanes; ++i) packed_q[i] = -packed_q[i];
    for (int64_t i = 0; pairs && i < call.head_dim / 2 * lanes; ++i) pairs_q.by_feature[i] ^= 0x80008000;
    return finite;
  }

  // What takes products of queries and keys to scores, unless `edit` has.
  f scale_in() const { return Vec::set1(plain ? std::fabs(call.scale) : 1.f); }

  void load_softmax() {
    close = true;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      ones[lane] = 1;
      row_max[lane] = lane < count ? call.row_max[row(lane)] : 0;
      row_scale[lane] = lane < count ? call.row_scale[row(lane)] : 0;
      log_scale[lane] = more && row_scale[lane] > 0 ? std::log(row_scale[lane]) : 0;
      shift[lane] = row_max[lane] * kLog2e;
      close = close && std::fabs(row_max[lane]) < 1e3f;
    }
    changes.start(share.batch, head, first, count);
  }

  void load_block() {
    load_softmax();
    kept.start(row(0), call.source, lanes);
    const bool finite_q = load_queries();
    odd = !load_rows(work.grad_out, call.value_dim, rows_grad, packed_grad, pairs_grad) || !finite_q;
    if (pairs && odd) {
      rows_q.load(call.q, call.type, share.batch, head, first, count, lanes, call.head_dim);
      rows_grad.load(work.grad_out, call.type, share.batch, head, first, count, lanes, call.value_dim);
    }
    std::memset(dq, 0, sizeof(float) * call.head_dim * lanes);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      delta[lane] = 0;
      if (lane >= count) continue;
      const float own = dot_with_out(lane) + (work.row_terms ? work.row_terms[row(lane)] : 0);
      delta[lane] = more ? own : call.scale * own;
    }
  }

  float dot_with_out(int64_t lane) {
    const auto row_of = [&](const View& view, float* convert) {
      return float_rows(view, call.type, share.batch, head, first + lane, 1, call.value_dim, convert).data;
    };
    const float *out = row_of(call.out, convert_v), *grad = row_of(work.grad_out, convert_k);
    f sum = Vec::zero();
    int64_t i = 0;
    for (; i + N <= call.value_dim; i += N) sum = Vec::fma(Vec::load(out + i), Vec::load(grad + i), sum);
    float result = Vec::sum(sum);
    for (; i < call.value_dim; ++i) result += out[i] * grad[i];
    return result;
  }

  Tile allow(int64_t from, int64_t n) {
    const Tile kind = tile_bits<W>(call.mask, ranges, share.batch, head, first, count, from, n, bits);
    if (!call.bias.data || kind == Tile::empty) return kind;
    load_bias<W>(call.bias, share.batch, head, first, count, from, n, bias_tile);
    return block_by_bias<W>(bias_tile, n, kind, bits);
  }

  template <bool masked>
  void weigh(float* x, float* g, int64_t s, int64_t n, bool in_pairs) const {
    if (in_pairs) differentiate_pairs<masked>(x, g, s, n);
    else differentiate<masked>(x, g, n, bits + s);
  }

  // `x` where a lane may read the source: what others hold may be anything.
  template <bool masked>
  static f only(uint64_t allowed, int j, f x) {
    return masked ? Vec::select(allowed >> (j * N), x, Vec::zero()) : x;
  }

  // Scores -> weights, gradients of weights -> those of q.k; delta has the scale
  template <bool masked>
  void differentiate(float* x, float* g, int64_t n, const uint64_t* allowed) const {
    const f scale = Vec::set1(call.scale), in = scale_in();
    for (int64_t s = 0; s < n; ++s)
      CLEARHEAD_UNROLL_FOR (int j = 0; j < W; ++j) {
        float *score = x + (s * W + j) * N, *grad = g + (s * W + j) * N;
        const f below = Vec::fms(Vec::load(score), in, Vec::load(row_max + j * N));
        const f weight = Vec::mul(exp_of(below), Vec::load(row_scale + j * N));
        const f change = Vec::fms(Vec::load(grad), scale, Vec::load(delta + j * N));
        Vec::store(score, only<masked>(allowed[s], j, weight));
        Vec::store(grad, only<masked>(allowed[s], j, Vec::mul(weight, change)));
      }
  }

  // The same where more hangs on the weights or scores than the context: `bias_tile`, if wanted, gets
  // the gradient of the final score.
  void differentiate_more(int64_t n) {
    const f scale = Vec::set1(call.scale), in = scale_in();
    for (int64_t i = 0; i < n * W; ++i) {
      const int j = (int)(i % W) * N;
      const f below = Vec::fms(Vec::load(scores + i * N), in, Vec::load(row_max + j));
      const f weight = Vec::mul(exp_of(below), Vec::load(row_scale + j));
      f grad = changes.with_entropy(Vec::load(grads + i * N), Vec::add(below, Vec::load(log_scale + j)), j);
      grad = Vec::mul(weight, Vec::sub(grad, Vec::load(delta + j)));
      if (work.readings.scores) grad = Vec::add(grad, Vec::load(changes.scores + i * N));
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

  // The context has the weights that are kept, times a scale: so have the gradients.
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
    return float_rows(view, call.type, share.batch, share.source_head, from, n, width, convert);
  }

  // Finds the parts of a tile that some query may read, from `bits`, unless it is worked on as a whole.
  void cut(int64_t n, bool whole) {
    part_count = 0;
    if (whole) parts[part_count++] = {0, n, 0, W};
    for (int64_t s = 0; s < n && !whole; s += kGroup) {
      const int64_t stop = min(n, s + kGroup);
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

  // result[s][lane] of sources from + s .. from + s + n and the vectors of a part
  void dot(const View& view, const Rows& rows, int64_t from, int64_t s, int64_t n, const Part& part, int64_t width,
           const float* packed, const uint32_t* packed_pairs, float* result) const {
    const int64_t lane = part.begin * N;
    with_vectors<W>(part.end - part.begin, [&](auto vectors) {
      constexpr int V = decltype(vectors)::value;
#ifdef CLEARHEAD_DOTS
      if (pairs) {
        const auto* short_rows = (const uint16_t*)at(view, call.type, share.batch, share.source_head, from + s);
        return dot_part<Pair, V>(short_rows, view.position, n, packed_pairs + lane, lanes, width / 2, result + lane);
      }
#endif
      (void)view, (void)from, (void)packed_pairs;
      dot_part<Single, V>(rows.data + s * rows.stride, rows.stride, n, packed + lane, lanes, width, result + lane);
    });
  }

  void tile(int64_t from, int64_t n, Tile kind) {
    const bool masked = kind == Tile::partial, selected = masked && !share.finite_keys;
    const bool in_pairs = pairs && close && !(more || odd || selected);
    const Rows k = rows_of(call.k, from, n, call.head_dim, convert_k);
    const Rows v = rows_of(call.v, from, n, call.value_dim, convert_v);
    // What no part holds is blocked and never looked at; other lanes of its groups are set to 0.
    cut(n, !masked || more || odd || selected);
    each_group([&](const Part& part, int64_t s, int64_t m) {
      const int64_t offset = s * lanes;
      float *x = in_pairs ? scores : scores + offset, *g = in_pairs ? grads : grads + offset;
      dot(call.k, k, from, s, m, part, call.head_dim, packed_q, pairs_q.by_feature, x);
      dot(call.v, v, from, s, m, part, call.value_dim, packed_grad, pairs_grad.by_feature, g);
      if (!plain || more)
        edit<W>(call, x, m, bias_tile + (call.bias.data ? offset : 0), masked ? bits + s : nullptr,
                call.softcap != 0 ? slope + offset : nullptr);
      if (more) return;
      if (masked) weigh<true>(x, g, s, m, in_pairs);
      else weigh<false>(x, g, s, m, in_pairs);
    });
    if (more) {
      if (kept.some_dropped()) drop_grads(from, n);
      changes.add(from, n, grads);
      if (work.readings.scores) changes.load_scores(from, n);
      if (masked) clear_blocked(grads, n, bits);
      if (masked && work.readings.scores) clear_blocked(changes.scores, n, bits);
      if (masked && call.softcap != 0) clear_blocked(slope, n, bits);
      differentiate_more(n);
      if (work.dbias.data) add_bias(from, n);
      if (kept.some_dropped()) drop(scores, n);
    }
    if (pairs && !in_pairs) round_tile(n);
    if (pairs && !selected) add_to_dq_in_pairs(from);
    else add_to_dq(from, n, selected);
    const int64_t place = share.place(from);
    for (int p = 0; p < part_count; ++p) {
      const int64_t row = place + parts[p].first;
      add_to_sources(parts[p], scores, short_weights, rows_grad, pairs_grad.by_query, share.value_width,
                     share.dv + row * share.value_width);
      add_to_sources(parts[p], grads, short_grads, rows_q, pairs_q.by_query, share.key_width,
                     share.dk + row * share.key_width);
    }
  }

  // Handles some sources of a part at a time.
  template <class Do>
  void each_group(Do handle) const {
    for (int p = 0; p < part_count; ++p)
      for (int64_t s = parts[p].first; s < parts[p].last; s += kGroup)
        handle(parts[p], s, min(kGroup, parts[p].last - s));
  }

  template <class E>
  void mix(const Part& part, const typename E::scalar* k, int64_t stride, int64_t n,
           const typename E::packed* weights) {
    const int64_t lane = part.begin * N;
    with_vectors<W>(part.end - part.begin, [&](auto vectors) {
      mix_part<E, decltype(vectors)::value>(k, stride, n, weights + lane, lanes, ones + lane, call.head_dim, dq + lane);
    });
  }

  void add_to_dq(int64_t from, int64_t n, bool selected) {
    const Rows k = float_rows(call.k, call.type, share.batch, share.source_head, from, n, call.head_dim, convert_k);
    if (selected) return mix_selected<W>(k.data, k.stride, n, grads, bits, ones, call.head_dim, dq);
    for (int p = 0; p < part_count; ++p) {
      const int64_t s = parts[p].first;
      mix<Single>(parts[p], k.data + s * k.stride, k.stride, parts[p].last - s, grads + s * lanes);
    }
  }

  void add_to_sources(const Part& part, const float* weights, const uint16_t* short_form, const Padded& rows,
                      const uint32_t* row_pairs, int64_t width, float* to) {
    const int64_t n = part.last - part.first, lane = part.begin * N, queries = min(part.end * N, count) - lane;
    weights += part.first * lanes + lane;
    if (odd) return outer_selected(weights, lanes, n, rows.data, rows.stride, count, width, to);
#ifdef CLEARHEAD_DOTS
    if (pairs)
      return outer_tile<Pair>(short_form + part.first * lanes + lane, lanes, n, row_pairs + lane / 2 * width, width,
                              (queries + 1) / 2, width, to);
#endif
    (void)short_form, (void)row_pairs;
    outer_tile<Single>(weights, lanes, n, rows.data + lane * rows.stride, rows.stride, queries, width, to);
  }

#ifdef CLEARHEAD_DOTS
  void add_to_dq_in_pairs(int64_t from) {
    const int64_t row = (share.batch * call.source_head + share.source_head) * ((call.source + 1) / 2) + from / 2;
    const auto* k = (const uint16_t*)(work.packed_k + row * call.head_dim);
    for (int p = 0; p < part_count; ++p) {
      const int64_t s = parts[p].first;
      mix<Pair>(parts[p], k + s * call.head_dim, 2 * call.head_dim, (parts[p].last - s + 1) / 2,
                grad_pairs + s / 2 * lanes);
    }
  }

  // As `differentiate`, straight to bf16: by query, and the gradients also as pairs of sources. Where
  // no score is large the base of the exponential is changed in the scale.
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

  // `bias_tile` holds the gradients of the scores; what the bias broadcasts over is summed.
  void add_bias(int64_t from, int64_t n) {
    const Sums& to = work.dbias;
    float* base =
        to.data + share.slot * to.slot + share.batch * to.batch + head * to.head + first * to.query + from * to.source;
    if (to.query) {
      for (int64_t lane = 0; lane < count; ++lane)
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
    transpose(dq, lanes, call.head_dim, count, packed_q, call.head_dim);  // packed_q has served
    for (int64_t lane = 0; lane < count; ++lane) {
      const float* from = packed_q + lane * call.head_dim;
      if (!work.dq_slots) {
        write_row(work.dq, work.type, share.batch, head, first + lane, from, call.head_dim);
        continue;
      }
      const int64_t row = ((share.slot * call.batch + share.batch) * call.head + head) * call.query + first + lane;
      std::memcpy(work.dq_slots + row * call.head_dim, from, sizeof(float) * call.head_dim);
    }
  }

  // Handles every `step`-th tile from `begin` on that some query may read, cut to what they read.
  template <class Do>
  void each_tile(int64_t begin, int64_t step, Do handle) {
    const int64_t first_read = ranges.first & ~(int64_t)1;  // whole pairs
    const int64_t last_read = min(call.source, (ranges.last + 1) & ~(int64_t)1);
    int64_t at = begin * kTile;
    if (first_read > at) at += (first_read - at) / (kTile * step) * kTile * step;
    for (; at < last_read; at += kTile * step) {
      const int64_t from = max(at, first_read), n = min(at + kTile, last_read) - from;
      if (n <= 0) continue;
      const Tile kind = allow(from, n);
      if (kind != Tile::empty) handle(from, n, kind);
    }
  }

  void run() {
    ranges = ranges_of(call.mask, share.batch, head, first, count, lanes, call.source);
    load_block();
    expected = 0;
    const int64_t late = ranges.last - 4 * kTile * work.slots;
    each_tile(share.slot, work.slots, [&](int64_t from, int64_t n, Tile kind) {
      if (from >= late) expect(lanes / 3);
      tile(from, n, kind);
    });
    write_dq();
  }

  // Asks for some rows that this block will write and the next one read, so that none is waited for.
  void expect(int64_t rows) {
    for (const int64_t stop = min(lanes, expected + rows); expected < stop; ++expected) {
      const int64_t here = first + expected, next = here + count;
      if (expected < count && !work.dq_slots) expect_row<1>(work.dq, work.type, share.batch, head, here, call.head_dim);
      if (next >= call.query) continue;
      expect_row<0>(call.q, call.type, share.batch, head, next, call.head_dim);
      expect_row<0>(call.out, call.type, share.batch, head, next, call.value_dim);
      expect_row<0>(work.grad_out, call.type, share.batch, head, next, call.value_dim);
    }
  }

  // What the gradient of each weight is worth to its row: sum_j weight_j * gradient_j, of readings that
  // are sums over queries or of the map itself, and so do not know it.
  void add_row_terms() {
    ranges = ranges_of(call.mask, share.batch, head, first, count, lanes, call.source);
    load_softmax();
    load_queries();
    std::memset(delta, 0, sizeof(float) * lanes);
    each_tile(0, 1, [&](int64_t from, int64_t n, Tile kind) { add_row_terms_of(from, n, kind == Tile::partial); });
    for (int64_t lane = 0; lane < count; ++lane) work.row_terms[row(lane)] += delta[lane];
  }

  void add_row_terms_of(int64_t from, int64_t n, bool masked) {
    const Rows k = rows_of(call.k, from, n, call.head_dim, convert_k);
    dot(call.k, k, from, 0, n, {0, n, 0, W}, call.head_dim, packed_q, pairs_q.by_feature, scores);
    if (!plain || masked) edit<W>(call, scores, n, bias_tile, masked ? bits : nullptr, nullptr);
    std::memset(grads, 0, sizeof(float) * n * lanes);
    changes.add_sums(from, n, grads);
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

// So many queries make the next block: never a narrow rest where two even ones do.
inline int64_t block_size(int64_t left) { return left > 3 * N && left <= 4 * N ? 2 * N : min(left, 3 * N); }

template <int W, class Do>
void with_block(Share& share, const Arena& arena, int64_t head, int64_t first, int64_t count, Do handle) {
  Gradient<W> gradient(share, arena);
  gradient.head = head, gradient.first = first, gradient.count = count;
  handle(gradient);
}

template <class Do>
void each_block(Share& share, const Arena& arena, int64_t head, int64_t first, int64_t last, Do handle) {
  for (int64_t count; first < last; first += count) {
    count = block_size(last - first);
    if (count > 2 * N) with_block<3>(share, arena, head, first, count, handle);
    else if (count > N) with_block<2>(share, arena, head, first, count, handle);
    else with_block<1>(share, arena, head, first, count, handle);
  }
}

// Work item: every `slots`-th tile of sources of one source head, or of all heads and samples that
// share a bias whose gradient is wanted, for all queries that read them.
void backward_item(const Backward& work, int64_t item, char* scratch) {
  const Forward& call = work.forward;
  Arena arena{scratch};
  Share share(work, item % work.slots, arena);
  const int64_t row = item / work.slots, group = call.head / call.source_head;
  const int64_t heads = call.source_head / work.shared_heads;
  const int64_t batch = row / heads * work.shared_batch, head = row % heads * work.shared_heads;
  for (share.batch = batch; share.batch < batch + work.shared_batch; ++share.batch)
    for (share.source_head = head; share.source_head < head + work.shared_heads; ++share.source_head) {
      share.start();
      for (int64_t h = 0; h < group; ++h)
        each_block(share, arena, share.source_head * group + h, 0, call.query, [](auto& block) { block.run(); });
      share.finish();
    }
}

// Work item: one block of queries of one head.
void backward_rows(const Backward& work, int64_t item, char* scratch) {
  const Forward& call = work.forward;
  Arena arena{scratch};
  Share share(work, 0, arena);
  const int64_t blocks = (call.query + kMaxLanes - 1) / kMaxLanes, row = item / blocks,
                first = item % blocks * kMaxLanes;
  const int64_t head = row % call.head;
  share.batch = row / call.head, share.source_head = head / (call.head / call.source_head);
  each_block(share, arena, head, first, min(first + kMaxLanes, call.query), [](auto& block) { block.add_row_terms(); });
}

// Work item: dQ of one head, from its slots.
void backward_sum(const Backward& work, int64_t item, char* scratch) {
  const Forward& call = work.forward;
  auto* sum = (float*)scratch;
  for (int64_t i = 0; i < call.query; ++i) {
    const int64_t step = call.batch * call.head * call.query * call.head_dim;
    const float* from = work.dq_slots + (item * call.query + i) * call.head_dim;
    std::memcpy(sum, from, sizeof(float) * call.head_dim);
    for (int64_t slot = 1; slot < work.slots; ++slot)
      for (int64_t j = 0; j < call.head_dim; ++j) sum[j] += from[slot * step + j];
    write_row(work.dq, work.type, item / call.head, item % call.head, i, sum, call.head_dim);
  }
}

size_t backward_scratch(const Backward& work) {
  Arena arena{nullptr};
  Share share(work, 0, arena);
  return Gradient<Vec::vectors>(share, arena).used + 64;
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
