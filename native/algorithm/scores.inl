// From q.k to the final score: scale, softcap, bias and mask. After masks.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// tanh, at most 3 ulp off: Cephes' polynomial below 0.625, the definition by exp above.
inline f tanh_of(f x) {
  const f size = Vec::max(x, Vec::sub(Vec::zero(), x));
  const f z = Vec::mul(x, x);
  f p = Vec::set1(-5.70498872745e-3f);
  p = Vec::fma(p, z, Vec::set1(2.06390887954e-2f));
  p = Vec::fma(p, z, Vec::set1(-5.37397155531e-2f));
  p = Vec::fma(p, z, Vec::set1(1.33314422036e-1f));
  p = Vec::fma(p, z, Vec::set1(-3.33332819422e-1f));
  const f near = Vec::fma(Vec::mul(p, z), x, x);
  const f far =
      Vec::sub(Vec::set1(1.f), Vec::div(Vec::set1(2.f), Vec::add(exp_of(Vec::add(size, size)), Vec::set1(1.f))));
  const f signed_far = Vec::select(Vec::greater(Vec::zero(), x), Vec::sub(Vec::zero(), far), far);
  return Vec::select(Vec::greater(Vec::set1(0.625f), size), near, signed_far);
}

// tile[s][lane] = bias of (query of lane, source `from + s`)
template <int W>
void load_bias(const Queries& queries, int64_t from, int64_t n, float* tile) {
  const Bias& bias = queries.call.bias;
  const float* base = bias.data + queries.batch * bias.batch + queries.head * bias.head + from * bias.source;
  for (int64_t lane = 0; lane < W * N; ++lane) {
    const float* row = base + (queries.first + min(lane, queries.count - 1)) * bias.query;
    for (int64_t s = 0; s < n; ++s) tile[s * W * N + lane] = row[s * bias.source];
  }
}

// Removes from `bits` the edges whose bias is -inf.
template <int W>
Tile block_by_bias(const float* tile, int64_t n, Tile kind, uint64_t* bits) {
  uint64_t any = 0, all = lane_mask(W * N);
  for (int64_t s = 0; s < n; ++s) {
    uint64_t blocked = 0;
    for (int j = 0; j < W; ++j)
      blocked |= Vec::greater(Vec::set1(-FLT_MAX), Vec::load(tile + (s * W + j) * N)) << (j * N);
    bits[s] = (kind == Tile::full ? lane_mask(W * N) : bits[s]) & ~blocked;
    any |= bits[s], all &= bits[s];
  }
  if (!any) return Tile::empty;
  return kind == Tile::full && all == lane_mask(W * N) ? Tile::full : Tile::partial;
}

// Whether scores stay the raw products q.k: the scale is then applied by the exponential.
bool keeps_raw_scores(const Forward& call) { return !call.bias.data && call.softcap == 0 && call.scale != 0; }

// Whether fp32 is not exact enough for a row with this largest score and this sum. Raw scores are scaled in the
// exponential: from about 1e9 on the rounding of the largest, 1 part in 2^24, is too large an error of an exponent.
// `readable` says that the row has a source to read, so that a sum of 0 means that all its scores are -inf.
inline bool is_row_out_of_range(const Forward& call, float most, float sum, bool readable) {
  if (sum == 0) return readable;
  return !(std::fabs(most) <= (keeps_raw_scores(call) ? 1e8f : FLT_MAX)) || !(sum <= FLT_MAX);
}

// Turns products into final scores: scale, softcap, bias, and -inf where masked. `slope`, if not null, receives the
// derivative of the softcap.
template <int W>
void finish_scores(const Forward& call, float* tile, int64_t n, const float* bias, const uint64_t* bits, float* slope) {
  const bool raw = keeps_raw_scores(call);
  const f blocked = Vec::set1(-INFINITY), scale = Vec::set1(call.scale);
  const f cap = Vec::set1(call.softcap), uncap = Vec::set1(call.softcap == 0 ? 0 : 1 / call.softcap);
  for (int64_t i = 0; i < n * W; ++i) {
    f x = Vec::load(tile + i * N);
    if (!raw) {
      x = Vec::mul(x, scale);
      if (call.softcap != 0) {
        const f bent = tanh_of(Vec::mul(x, uncap));
        x = Vec::mul(cap, bent);
        if (slope) Vec::store(slope + i * N, Vec::sub(Vec::set1(1.f), Vec::mul(bent, bent)));
      }
      if (call.bias.data) x = Vec::add(x, Vec::load(bias + i * N));
    }
    if (bits) x = Vec::select(bits[i / W] >> (i % W * N), x, blocked);
    Vec::store(tile + i * N, x);
  }
}

bool all_finite(const Rows& rows, int64_t n, int64_t width) {
  for (int64_t s = 0; s < n; ++s) {
    const float* row = rows.data + s * rows.stride;
    uint64_t bad = 0;
    int64_t i = 0;
    for (; i + N <= width; i += N) bad |= Vec::not_finite(Vec::load(row + i));
    for (; i < width; ++i) bad |= !(std::fabs(row[i]) <= FLT_MAX);
    if (bad) return false;
  }
  return true;
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
