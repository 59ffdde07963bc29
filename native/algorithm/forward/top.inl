// The largest scores of each query and their sources. After softmax.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int kShortTop = 8;  // lists up to this length stay in registers while a tile is searched

// A sorted list for each lane. A tile without a score that enters it costs one comparison.
template <int W>
struct TopList {
  static constexpr int lanes = W * N;
  const Forward& call;
  const Queries& queries;
  const int64_t length;
  float *scores, *sources;  // [rank][lane]; the sources are int32 numbers, which only move

  TopList(const Queries& queries, Arena& arena)
      : call(queries.call),
        queries(queries),
        length(call.top ? max(call.top, kShortTop) : 0),
        scores(arena.take<float>(length * lanes)),
        sources(arena.take<float>(length * lanes)) {}

  void start() {
    for (int64_t i = 0; i < length * lanes; ++i) scores[i] = -INFINITY;
    std::memset(sources, 0xff, sizeof(float) * length * lanes);  // -1
  }

  // `most` holds the largest score of each lane in the tile.
  void gather(const float* tile, int64_t from, int64_t n, const float* most) {
    const float* worst = scores + (length - 1) * lanes;
    for (int j = 0; j < W; ++j) {
      if (!Vec::greater(Vec::load(most + j * N), Vec::load(worst + j * N))) continue;
      if (length == kShortTop) gather_short(tile + j * N, from, n, j * N);
      else gather_long(tile + j * N, from, n, j * N);
    }
  }

  void write(const OnlineSoftmax<W>& softmax) const {
    const f factor = Vec::set1(softmax.exponent.factor);
    for (int64_t k = 0; k < call.top; ++k) {
      float weight[lanes];
      for (int at = 0; at < lanes; at += N) {
        const f below = Vec::fms(Vec::load(scores + k * lanes + at), factor, Vec::load(softmax.row_max + at));
        // NaN in a row that reads one
        Vec::store(weight + at, Vec::mul(softmax.exponent.exp(below), Vec::load(softmax.rescale + at)));
      }
      for (int64_t lane = 0; lane < queries.count; ++lane) {
        int32_t source;
        std::memcpy(&source, sources + k * lanes + lane, 4);
        call.top_weights[queries.row(lane) * call.top + k] = source < 0 ? 0 : weight[lane];
        call.top_sources[queries.row(lane) * call.top + k] = source;
      }
    }
  }

  // All weights of a row that reads a NaN are NaN and tie: its top sources are the first that it may read.
  void take_first(int64_t lane, TileParts<W>& parts) {
    int64_t found = 0;
    for (int64_t from = parts.ranges.first & ~(int64_t)7; from < parts.ranges.last; from += kTile) {
      const int64_t n = min(kTile, parts.ranges.last - from);
      const Tile kind = parts.find_bits(from, n);
      for (int64_t s = 0; s < n && kind != Tile::empty; ++s)
        if (found < call.top && (kind == Tile::full || parts.bits[s] >> lane & 1)) {
          const int32_t source = (int32_t)(from + s);
          std::memcpy(sources + found++ * lanes + lane, &source, 4);
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

  void gather_long(const float* tile, int64_t from, int64_t n, int lane) {
    float* worst = scores + (length - 1) * lanes + lane;
    float* worst_source = sources + (length - 1) * lanes + lane;
    for (int64_t s = 0; s < n; ++s) {
      const f score = Vec::load(tile + s * lanes), source = Vec::same_bits((int32_t)(from + s));
      uint64_t rises = Vec::greater(score, Vec::load(worst));
      if (!rises) continue;
      Vec::store(worst, Vec::select(rises, score, Vec::load(worst)));
      Vec::store(worst_source, Vec::select(rises, source, Vec::load(worst_source)));
      float *here = worst, *here_source = worst_source;
      for (int64_t k = length - 1; k > 0; --k, here -= lanes, here_source -= lanes) {
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
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
