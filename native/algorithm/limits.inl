// What the machine can do at most: multiply-adds that wait for nothing but each other, alone or with
// what a softmax needs for each score. After forward.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int kChains = Vec::rows * Vec::vectors;
#define CLEARHEAD_UNROLL_ALL_FOR _Pragma("GCC unroll 32") for

// The least that a vector of scores takes: its maximum, its distance from it, 2 to that power, a sum
struct Softmax {
  f score, most = Vec::zero(), total = Vec::zero();
  void step() {
    most = Vec::max(score, most);
    total = Vec::add(total, Vec::exp2(Vec::fms(score, Vec::set1(kLog2e), most)));
  }
};

// Sums that wait only for themselves. With `apart` a vector of scores comes after so many multiply-adds.
template <class E, bool softmax>
void multiply_add(int64_t rounds, int64_t apart, float* sink) {
  f sum[kChains];
  CLEARHEAD_UNROLL_ALL_FOR (int c = 0; c < kChains; ++c) sum[c] = Vec::set1(sink[c]);
  typename E::packed numbers[N] = {};
  const typename E::vec x = E::load(numbers);
  Softmax scores{sum[0]};
  for (int64_t done = 0, left = 0; done < rounds;) {
    const int64_t stop = softmax ? min(rounds, done + max(1, (left + apart) / kChains)) : rounds;
    left += apart - (stop - done) * kChains;
    for (; done < stop; ++done) {
      CLEARHEAD_UNROLL_ALL_FOR (int c = 0; c < kChains; ++c) sum[c] = E::mac(x, x, sum[c]);
    }
    if (softmax) scores.step();
  }
  CLEARHEAD_UNROLL_ALL_FOR (int c = 0; c < kChains; ++c) sink[c] = Vec::sum(sum[c]);
  if (softmax) sink[0] += Vec::sum(scores.total);
}

// Runs so many rounds, with one exponential for every `each` multiply-adds (0: none), and returns how
// many floating-point operations the multiply-adds were.
template <class E>
double peak_of(int64_t rounds, int64_t each) {
  // Every chain begins with a number of its own that the compiler cannot know, or it would run those
  // that are alike once for all.
  volatile float zero = 0;
  float sink[kChains];
  for (float& number : sink) number = zero;
  const int64_t apart = each / E::step;
  if (apart) multiply_add<E, true>(rounds, apart, sink);
  else multiply_add<E, false>(rounds, 0, sink);
  // And every chain counts, or it would leave out those that nobody looks at.
  volatile float keep = 0;
  for (float number : sink) keep = keep + number;
  return 2.0 * rounds * kChains * N * E::step;
}

double peak(int64_t rounds, int64_t each, bool pairs) {
#ifdef CLEARHEAD_DOTS
  if (pairs) return peak_of<Pair>(rounds, each);
#endif
  (void)pairs;
  return peak_of<Single>(rounds, each);
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
