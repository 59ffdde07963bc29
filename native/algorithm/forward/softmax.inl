// The online softmax of a block of queries: the running maximum and sum of each row. After parts.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// The running maximum is that of score * factor. The exponent is of base 2 where scores are raw products and fma
// rounds once; it stays natural where scores may come close to the largest numbers.
struct Exponent {
  bool base_two;
  float factor;
  double natural;  // takes an exponent to base e: ln 2 corrected for the rounding of `factor`, or 1

  explicit Exponent(const Forward& call) {
    const bool raw = keeps_raw_scores(call);
    base_two = raw && Vec::fused;
    factor = raw ? (float)(std::fabs(call.scale) * (base_two ? kLog2eWide : 1)) : 1.f;
    natural = base_two ? std::fabs((double)call.scale) / factor : 1;
  }
  f exp(f x) const { return base_two ? Vec::exp2(x) : exp_of(x); }
};

template <int W>
struct OnlineSoftmax {
  static constexpr int lanes = W * N;
  const Forward& call;
  const Queries& queries;
  const Exponent exponent;
  float *row_max, *row_sum, *neg_entropy;  // neg_entropy: sum of weight * log(weight) before normalization
  // The sums of earlier tiles and the maximum that they refer to, once there are any: high and low of each sum
  float *sum_high, *sum_low, *entropy_high, *entropy_low, *folded_max;
  bool folded = false;
  float* best;     // the largest score as the tiles have it, without the sink; kept where `max_score` is wanted
  float* rescale;  // what the last tile multiplied earlier sums by; after `normalize` one over the sum, or 0
  bool out_of_range = false;

  OnlineSoftmax(const Queries& queries, Arena& arena)
      : call(queries.call),
        queries(queries),
        exponent(call),
        row_max(arena.take<float>(lanes)),
        row_sum(arena.take<float>(lanes)),
        neg_entropy(arena.take<float>(lanes)),
        sum_high(arena.take<float>(lanes)),
        sum_low(arena.take<float>(lanes)),
        entropy_high(arena.take<float>(lanes)),
        entropy_low(arena.take<float>(lanes)),
        folded_max(arena.take<float>(lanes)),
        best(arena.take<float>(lanes)),
        rescale(arena.take<float>(lanes)) {}

  // The sink logit enters as the first score.
  void start() {
    float first = -FLT_MAX, weight = 0;
    if (call.sinks && call.sinks[queries.head] != -INFINITY) {
      const float sink = call.sinks[queries.head];
      first = (float)fmin(fmax(sink / exponent.natural, -FLT_MAX), FLT_MAX);
      weight = (float)std::exp(sink - first * exponent.natural);
    }
    for (int lane = 0; lane < lanes; ++lane) row_max[lane] = first, row_sum[lane] = weight, neg_entropy[lane] = 0;
    for (int lane = 0; lane < lanes; ++lane) best[lane] = -INFINITY;
    folded = false;
  }

  // Adds the sums so far to the exact ones, which are scaled to the maximum so far, and begins new ones.
  CLEARHEAD_NOINLINE void fold() {
    if (!folded) begin_folding();
    for (int at = 0; at < lanes; at += N) {
      const f most = Vec::load(row_max + at), drop = Vec::sub(Vec::load(folded_max + at), most);
      const f shrink = exponent.exp(drop), sum = Vec::load(sum_high + at);
      const f moved = Vec::fma(Vec::max(Vec::set1(-1000.f), drop), sum, Vec::load(entropy_high + at));
      Vec::store(entropy_high + at, Vec::mul(moved, shrink)), Vec::store(sum_high + at, Vec::mul(sum, shrink));
      Vec::store(entropy_low + at, Vec::mul(Vec::load(entropy_low + at), shrink));
      Vec::store(sum_low + at, Vec::mul(Vec::load(sum_low + at), shrink));
      add_exactly(sum_high + at, sum_low + at, Vec::load(row_sum + at));
      add_exactly(entropy_high + at, entropy_low + at, Vec::load(neg_entropy + at));
      Vec::store(folded_max + at, most), Vec::store(row_sum + at, Vec::zero());
      Vec::store(neg_entropy + at, Vec::zero());
    }
  }

  // After the last tile.
  void finish() {
    if (!folded) return;
    fold();
    for (int at = 0; at < lanes; at += N) {
      Vec::store(row_sum + at, Vec::add(Vec::load(sum_high + at), Vec::load(sum_low + at)));
      Vec::store(neg_entropy + at, Vec::add(Vec::load(entropy_high + at), Vec::load(entropy_low + at)));
    }
  }

  // most[lane] = the largest score of a tile
  static void find_most(const float* tile, const TileParts<W>& parts, float* most) {
    for (int lane = 0; lane < lanes; ++lane) most[lane] = -INFINITY;
    parts.each([&](auto vectors, const Part& part) {
      const int lane = part.begin * N;
      find_most_of<vectors>(tile + part.first * lanes + lane, part.last - part.first, most + lane);
    });
  }

  void keep_best(const float* most) {
    for (int at = 0; at < lanes; at += N) Vec::store(best + at, Vec::max(Vec::load(most + at), Vec::load(best + at)));
  }

  // Scores of a tile become weights, not yet normalized, in place, or bf16 pairs of sources in `weight_pairs`; both
  // if `keep` says so.
  template <bool entropy>
  void update(float* tile, const TileParts<W>& parts, const float* most, bool in_pairs, uint32_t* weight_pairs,
              bool keep) {
    alignas(64) float sum[lanes], spread[lanes];
    for (int lane = 0; lane < lanes; ++lane) sum[lane] = spread[lane] = 0;
    raise_max<entropy>(most);
    parts.each([&](auto vectors, const Part& part) {
      const int lane = part.begin * N;
      float* first = tile + part.first * lanes + lane;
      auto weigh = [&](auto how, auto base_two) {
        using E = decltype(how);
        find_weights<E, vectors, entropy, base_two>(first, part.last - part.first, exponent.factor, row_max + lane,
                                                    sum + lane, spread + lane,
                                                    weight_pairs + part.first / 2 * lanes + lane, E::step == 1 || keep);
      };
      using Yes = std::true_type;
      using No = std::false_type;
#ifdef CLEARHEAD_DOTS
      if (in_pairs) return exponent.base_two ? weigh(Pair(), Yes()) : weigh(Pair(), No());
#endif
      (void)in_pairs;
      exponent.base_two ? weigh(Single(), Yes()) : weigh(Single(), No());
    });
    for (int at = 0; at < lanes; at += N) {
      Vec::store(row_sum + at, Vec::fma(Vec::load(row_sum + at), Vec::load(rescale + at), Vec::load(sum + at)));
      if (entropy) Vec::store(neg_entropy + at, Vec::add(Vec::load(neg_entropy + at), Vec::load(spread + at)));
    }
  }

  void normalize() {
    for (int lane = 0; lane < lanes; ++lane) rescale[lane] = row_sum[lane] == 0 ? 0 : 1 / row_sum[lane];
  }

  bool is_out_of_range(const Ranges& ranges) const {
    bool result = out_of_range;
    if (result || surely_in_range()) return result;
    for (int64_t lane = 0; lane < queries.count; ++lane) {
      bool readable = !ranges.count;
      for (int64_t r = 0; r < ranges.count; ++r) readable |= ranges.all[r].start[lane] < ranges.all[r].stop[lane];
      result |= is_row_out_of_range(call, (float)(row_max[lane] * exponent.natural), row_sum[lane],
                                    readable && !call.mask.bytes && !call.bias.data);
    }
    return result;
  }

  // Fills the results that follow from the maximum and the sum alone.
  void write() const {
    for (int64_t lane = 0; lane < queries.count; ++lane) {
      const int64_t row = queries.row(lane);
      const bool empty = row_sum[lane] == 0;
      const float log_sum = empty ? 0 : std::log(row_sum[lane]);
      const double most = empty ? 0 : row_max[lane] * exponent.natural;
      if (call.lse) call.lse[row] = empty ? -INFINITY : (float)(most + log_sum);
      if (call.row_max) {
        const float rounded = (float)most;
        call.row_max[row] = rounded, call.row_scale[row] = rescale[lane] * (float)std::exp(rounded - most);
      }
      if (call.entropy) call.entropy[row] = empty ? 0 : entropy_of(lane, most);
      if (call.max_score) call.max_score[row] = best_score(lane);
    }
  }

 private:
  void begin_folding() {
    folded = true;
    for (int lane = 0; lane < lanes; ++lane)
      sum_high[lane] = sum_low[lane] = entropy_high[lane] = entropy_low[lane] = 0;
    std::memcpy(folded_max, row_max, sizeof(float) * lanes);
  }

  template <int V>
  static void find_most_of(const float* tile, int64_t n, float* most) {
    f now[V];
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) now[j] = Vec::load(most + j * N);
    for (int64_t s = 0; s < n; ++s, tile += lanes)
      CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) now[j] = Vec::max(Vec::load(tile + j * N), now[j]);
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) Vec::store(most + j * N, now[j]);
  }

  template <bool entropy>
  void raise_max(const float* most) {
    for (int at = 0; at < lanes; at += N) {
      const f raw = Vec::load(most + at), old = Vec::load(row_max + at);
      const f scaled = Vec::mul(raw, Vec::set1(exponent.factor));
      out_of_range |= (Vec::not_finite(scaled) & ~Vec::not_finite(raw)) != 0;
      const f now = Vec::max(scaled, old);
      const f drop = Vec::sub(old, now);
      const f shrink = exponent.exp(drop);
      if (entropy) {
        const f moved =
            Vec::fma(Vec::max(Vec::set1(-1000.f), drop), Vec::load(row_sum + at), Vec::load(neg_entropy + at));
        Vec::store(neg_entropy + at, Vec::mul(moved, shrink));
      }
      Vec::store(rescale + at, shrink), Vec::store(row_max + at, now);
    }
  }

  template <class E, int V, bool entropy, bool base_two>
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
      const f weight = base_two ? Vec::exp2(below) : exp_of(below);
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

  // True in nearly every call: each row has a positive sum, and a maximum well inside the range.
  bool surely_in_range() const {
    const f zero = Vec::zero(), limit = Vec::set1(1e7f);
    uint64_t inside = lane_mask(N);
    for (int at = 0; at < padded(queries.count); at += N) {
      const f sum = Vec::load(row_sum + at), top = Vec::load(row_max + at);
      inside &= Vec::greater(sum, zero) & ~Vec::not_finite(sum);
      inside &= Vec::greater(limit, top) & Vec::greater(top, Vec::sub(zero, limit));
    }
    return inside == lane_mask(N);
  }

  // Raw scores are products of query and key: the factor that makes them exponents makes them scores.
  float best_score(int64_t lane) const {
    return best[lane] == -INFINITY ? -INFINITY : (float)(best[lane] * (exponent.factor * exponent.natural));
  }

  // The sink counts in the denominator and is no source. Rounding makes no entropy negative; a NaN stays.
  float entropy_of(int64_t lane, double most) const {
    const double sum = row_sum[lane];
    const double below = call.sinks ? call.sinks[queries.head] - most : -INFINITY, sink = std::exp(below);
    const double spread = neg_entropy[lane] * exponent.natural - (sink > 0 ? sink * below : 0);
    const double entropy = (std::log(sum) * (sum - sink) - spread) / sum;
    return entropy <= 0 ? 0 : (float)entropy;
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
