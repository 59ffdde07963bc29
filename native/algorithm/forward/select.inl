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

constexpr int64_t kRun = 32;  // keys that are sorted by their ranks

// Sorts a few keys that differ, the largest first: the rank of a key is the number of larger ones. No branch depends on
// the keys.
inline void sort_run(uint64_t* keys, int64_t count, uint64_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t rank = 0;
    for (int64_t j = 0; j < count; ++j) rank += keys[j] > keys[i];
    to[rank] = keys[i];
  }
}

// Merges two sorted lists; no branch depends on the keys while both have some.
inline void merge_largest(const uint64_t* a, const uint64_t* a_end, const uint64_t* b, const uint64_t* b_end,
                          uint64_t* to) {
  while (a < a_end && b < b_end) {
    const bool left = *a > *b;
    *to++ = left ? *a : *b;
    a += left, b += !left;
  }
  while (a < a_end) *to++ = *a++;
  while (b < b_end) *to++ = *b++;
}

// Sorts keys that differ, the largest first. `room` holds as many keys.
void sort_largest(uint64_t* keys, int64_t count, uint64_t* room) {
  uint64_t *from = room, *to = keys;
  for (int64_t i = 0; i < count; i += kRun) sort_run(keys + i, min(kRun, count - i), room + i);
  for (int64_t run = kRun; run < count; run *= 2) {
    for (int64_t i = 0; i < count; i += 2 * run) {
      const int64_t middle = min(i + run, count), last = min(i + 2 * run, count);
      merge_largest(from + i, from + middle, from + middle, from + last, to + i);
    }
    uint64_t* const merged = to;
    to = from, from = merged;
  }
  if (from != keys) std::memcpy(keys, from, sizeof(uint64_t) * count);
}

inline uint64_t median(uint64_t a, uint64_t b, uint64_t c) {
  const uint64_t low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c > high ? high : c;
}

// Moves the largest `wanted` of keys that differ to the front, by partitions without a branch that depends on the keys;
// a heap bounds the time of an unlucky order.
void select_largest(uint64_t* keys, int64_t count, int64_t wanted) {
  int64_t first = 0, last = count, passes = 0;
  while (last - first > 8 && ++passes < 48) {
    const uint64_t pivot = median(keys[first], keys[first + (last - first) / 2], keys[last - 1]);
    // Keys before `at` are above the pivot, the others, which it is one of, are not.
    int64_t at = first;
    for (int64_t i = first; i < last; ++i) {
      const uint64_t key = keys[i];
      keys[i] = keys[at], keys[at] = key;
      at += key > pivot;
    }
    if (wanted == at) return;
    if (wanted < at) {
      last = at;
    } else {
      // The pivot is the largest of the rest.
      for (int64_t i = at; i < last; ++i)
        if (keys[i] == pivot) swap_keys(keys[i], keys[at]), i = last;
      if (wanted == ++at) return;
      first = at;
    }
  }
  make_heap(keys + first, wanted - first);
  for (int64_t i = wanted; i < last; ++i)
    if (keys[i] > keys[first]) swap_keys(keys[i], keys[first]), sift_down(keys + first, wanted - first, 0);
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
