// The peak throughput of the machine: chains of multiply-adds that depend only on themselves, alone or with the work of
// a softmax. After micro.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int kChains = Vec::rows_by_three * Vec::vectors;
#define CLEARHEAD_UNROLL_ALL_FOR _Pragma("GCC unroll 32") for

// The least work of a softmax for a vector of scores: the maximum, the distance from it, 2 to that power, and a sum
struct SoftmaxWork {
  f score, most = Vec::zero(), total = Vec::zero();
  void step() {
    most = Vec::max(score, most);
    total = Vec::add(total, Vec::exp2(Vec::fms(score, Vec::set1(kLog2e), most)));
  }
};

// With `softmax` a vector of scores is processed after every `apart` multiply-adds.
template <class E, bool softmax>
void multiply_add(int64_t rounds, int64_t apart, float* sink) {
  f sum[kChains];
  CLEARHEAD_UNROLL_ALL_FOR (int c = 0; c < kChains; ++c) sum[c] = Vec::set1(sink[c]);
  typename E::packed numbers[N] = {};
  const typename E::vec x = E::load(numbers);
  SoftmaxWork scores{sum[0]};
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

// Runs so many rounds, with one exponential for every `each` multiply-adds (none for 0), and returns the number of
// floating-point operations in the multiply-adds.
template <class E>
double peak_of(int64_t rounds, int64_t each) {
  // Each chain starts with a number that the compiler does not know; it would compute equal chains only once.
  volatile float zero = 0;
  float sink[kChains];
  for (float& number : sink) number = zero;
  const int64_t apart = each / E::step;
  if (apart) multiply_add<E, true>(rounds, apart, sink);
  else multiply_add<E, false>(rounds, 0, sink);
  // Each chain is used; the compiler would drop the others.
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
