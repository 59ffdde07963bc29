// Which weights dropout keeps: SplitMix64 (Steele, Lea, Flood 2014) of the seed and the edge's index, as in the
// other implementations, so that all of them drop the same weights. After common.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr uint64_t kHashStep = 0x9e3779b97f4a7c15u;

// The dropout of one block of queries; `states` holds the hash state of each query at source 0.
struct Kept {
  const Dropout& dropout;
  uint64_t* states;

  Kept(const Dropout& dropout, int64_t lanes, Arena& arena)
      : dropout(dropout), states(arena.take<uint64_t>(dropout.least ? lanes : 0)) {}

  bool some_dropped() const { return dropout.least; }
  float scale() const { return dropout.least ? dropout.scale : 1; }

  // `row` is the index of the first query among those of all heads and samples.
  void start(int64_t row, int64_t source, int64_t lanes) {
    for (int64_t lane = 0; dropout.least && lane < lanes; ++lane)
      states[lane] = dropout.seed + (uint64_t)(row + lane) * (uint64_t)source * kHashStep;
  }

  // One bit for each of the N queries from `lane` on: whether its weight of `source` is kept
  uint64_t bits(int64_t lane, int64_t source) const {
    return Vec::hash_at_least(states + lane, (uint64_t)source * kHashStep, dropout.least);
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
