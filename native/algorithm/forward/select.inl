// Scores and their sources as keys, and the largest of them. After common.inl.
// The standard library's algorithms are templates that all instruction sets would share.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// A number that is larger for a larger score and, of equal scores, for the lower source.
inline uint64_t key_of(float score, int32_t source) {
  uint32_t bits;
  score += 0.f;  // -0 becomes 0
  std::memcpy(&bits, &score, 4);
  bits ^= bits >> 31 ? ~0u : 1u << 31;
  return (uint64_t)bits << 32 | ~(uint32_t)source;
}

inline float score_of(uint64_t key) {
  uint32_t bits = (uint32_t)(key >> 32);
  bits ^= bits >> 31 ? 1u << 31 : ~0u;
  float score;
  std::memcpy(&score, &bits, 4);
  return score;
}

inline void swap_keys(uint64_t& a, uint64_t& b) {
  const uint64_t old = a;
  a = b, b = old;
}

// Restores a heap, whose root is the least, below place i.
inline void sift_down(uint64_t* keys, int64_t count, int64_t i) {
  for (int64_t child = 2 * i + 1; child < count; i = child, child = 2 * i + 1) {
    if (child + 1 < count && keys[child + 1] < keys[child]) ++child;
    if (keys[i] <= keys[child]) return;
    swap_keys(keys[i], keys[child]);
  }
}

inline void make_heap(uint64_t* keys, int64_t count) {
  for (int64_t i = count / 2; i-- > 0;) sift_down(keys, count, i);
}

// Sorts keys that differ, the largest first.
void sort_largest(uint64_t* keys, int64_t count) {
  make_heap(keys, count);
  for (; count > 1; --count) swap_keys(keys[0], keys[count - 1]), sift_down(keys, count - 1, 0);
}

// Moves the largest `wanted` of keys that differ to the front, by partitions; a heap bounds the time of an unlucky
// order.
void select_largest(uint64_t* keys, int64_t count, int64_t wanted) {
  int64_t first = 0, last = count, passes = 0;
  while (last - first > 8 && ++passes < 48) {
    uint64_t &low = keys[first], &middle = keys[first + (last - first) / 2], &high = keys[last - 1];
    if (low < middle) swap_keys(low, middle);
    if (middle < high) swap_keys(middle, high);
    if (low < middle) swap_keys(low, middle);
    const uint64_t pivot = middle;
    int64_t left = first, right = last - 1;
    for (;; ++left, --right) {
      while (keys[left] > pivot) ++left;
      while (keys[right] < pivot) --right;
      if (left >= right) break;
      swap_keys(keys[left], keys[right]);
    }
    // Everything before `left` is at least the pivot, and everything from `left` on at most the pivot.
    if (wanted == left) return;
    if (wanted < left) last = left;
    else first = left;
  }
  make_heap(keys + first, wanted - first);
  for (int64_t i = wanted; i < last; ++i)
    if (keys[i] > keys[first]) swap_keys(keys[i], keys[first]), sift_down(keys + first, wanted - first, 0);
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
