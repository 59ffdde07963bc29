// What the machine can do at most: multiply-adds that wait for nothing but each other.
// After forward.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int kChains = Vec::rows * Vec::vectors;

template <class E>
void multiply_add(int64_t rounds, float* sink) {
  f sum[kChains];
  CLEARHEAD_UNROLL for (int c = 0; c < kChains; ++c) sum[c] = Vec::set1(sink[c]);
  typename E::packed numbers[N] = {};
  const typename E::vec x = E::load(numbers);
  for (int64_t r = 0; r < rounds; ++r) {
    _Pragma("GCC unroll 32") for (int c = 0; c < kChains; ++c) sum[c] = E::mac(x, x, sum[c]);
  }
  for (int c = 0; c < kChains; ++c) sink[c] = Vec::sum(sum[c]);
}

// Runs so many rounds and returns how many floating-point operations they were.
double peak(int64_t rounds, bool pairs) {
  // Every chain begins with a number of its own that the compiler cannot know, or it would run those
  // that are alike once for all.
  volatile float zero = 0;
  float sink[kChains];
  for (float& each : sink) each = zero;
#ifdef CLEARHEAD_DOTS
  if (pairs) multiply_add<Pair>(rounds, sink);
  else multiply_add<Single>(rounds, sink);
#else
  pairs = false;
  multiply_add<Single>(rounds, sink);
#endif
  // And every chain counts, or it would leave out those that nobody looks at.
  volatile float keep = 0;
  for (float each : sink) keep = keep + each;
  return 2.0 * rounds * kChains * N * (pairs ? 2 : 1);
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
