// What the machine can do at most: multiply-adds that wait for nothing but each other, alone or with
// what a softmax needs for each score. After forward.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int kChains = Vec::rows * Vec::vectors;

// The least that a vector of scores takes: its maximum, its distance from it, 2 to that power, a sum
struct Softmax {
  f score, most = Vec::zero(), total = Vec::zero();
  void step() {
    most = Vec::max(score, most);
    total = Vec::add(total, Vec::exp2(Vec::fms(score, Vec::set1(kLog2e), most)));
  }
};

// After every `apart` multiply-adds comes one vector of scores; 0 for none.
template <class E>
void multiply_add(int64_t rounds, int64_t apart, float* sink) {
  f sum[kChains];
  _Pragma("GCC unroll 32") for (int c = 0; c < kChains; ++c) sum[c] = Vec::set1(sink[c]);
  typename E::packed numbers[N] = {};
  const typename E::vec x = E::load(numbers);
  Softmax softmax{sum[0]};
  int64_t left = apart ? apart : rounds * kChains;
  for (int64_t r = 0; r < rounds; ++r) {
    _Pragma("GCC unroll 32") for (int c = 0; c < kChains; ++c) sum[c] = E::mac(x, x, sum[c]);
    for (left -= kChains; left < 0; left += apart) softmax.step();
  }
  _Pragma("GCC unroll 32") for (int c = 0; c < kChains; ++c) sink[c] = Vec::sum(sum[c]);
  sink[0] += Vec::sum(softmax.total);
}

// Runs so many rounds, with one exponential for every `each` multiply-adds (0: none), and returns how
// many floating-point operations the multiply-adds were.
double peak(int64_t rounds, int64_t each, bool pairs) {
  // Every chain begins with a number of its own that the compiler cannot know, or it would run those
  // that are alike once for all.
  volatile float zero = 0;
  float sink[kChains];
  for (float& number : sink) number = zero;
#ifdef CLEARHEAD_DOTS
  if (pairs) multiply_add<Pair>(rounds, each / 2, sink);
  else multiply_add<Single>(rounds, each, sink);
#else
  pairs = false;
  multiply_add<Single>(rounds, each, sink);
#endif
  // And every chain counts, or it would leave out those that nobody looks at.
  volatile float keep = 0;
  for (float number : sink) keep = keep + number;
  return 2.0 * rounds * kChains * N * (pairs ? 2 : 1);
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
