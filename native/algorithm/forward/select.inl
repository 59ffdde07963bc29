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

// Merges two sorted lists; no branch depends on the keys while both have some. Lists of one length are merged from both
// ends at once, in two chains of operations that do not wait for each other.
inline void merge_largest(const uint64_t* a, const uint64_t* a_end, const uint64_t* b, const uint64_t* b_end,
                          uint64_t* to) {
  if (a_end - a == b_end - b) {
    const int64_t count = a_end - a;
    uint64_t* back = to + 2 * count;
    for (int64_t i = 0; i < count; ++i) {
      const bool left = *a > *b, right = *--a_end > *--b_end;
      *to++ = left ? *a : *b, *--back = right ? *b_end : *a_end;
      a += left, b += !left, a_end += right, b_end += !right;
    }
    return;
  }
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

constexpr int64_t kSample = 16;  // keys that a pivot is chosen from

// The place of a key of [first, last) whose rank there is about `rank`. The sample is spread evenly, so that no common
// order of the scores (rising, falling, up and down again) leads to a bad pivot.
inline int64_t pivot_near(const uint64_t* keys, int64_t first, int64_t last, int64_t rank) {
  const int64_t count = last - first, wanted = min(rank * kSample / count, kSample - 1);
  uint64_t sample[kSample];
  for (int64_t i = 0; i < kSample; ++i) sample[i] = keys[first + (2 * i + 1) * count / (2 * kSample)];
  int64_t found = 0;
  for (int64_t i = 0; i < kSample; ++i) {
    int64_t larger = 0;
    for (int64_t j = 0; j < kSample; ++j) larger += sample[j] > sample[i];
    found = larger == wanted ? i : found;
  }
  return first + (2 * found + 1) * count / (2 * kSample);
}

// Moves the largest of keys that differ to the front and returns how many: at least `least` and at most `most`,
// whatever costs less. The partitions have no branch that depends on the keys; a heap bounds the time of an unlucky
// order.
int64_t select_largest(uint64_t* keys, int64_t count, int64_t least, int64_t most) {
  int64_t first = 0, last = count, passes = 0;
  while (last - first >= kSample && ++passes < 24) {
    swap_keys(keys[pivot_near(keys, first, last, (least + most) / 2 - first)], keys[last - 1]);
    const uint64_t pivot = keys[last - 1];
    int64_t at = first;  // keys before it are above the pivot
    for (int64_t i = first; i < last - 1; ++i) {
      const uint64_t key = keys[i];
      keys[i] = keys[at], keys[at] = key;
      at += key > pivot;
    }
    if (at > most) {
      last = at;
    } else if (at >= least) {
      return at;
    } else {
      swap_keys(keys[at], keys[last - 1]);
      if (++at == least) return at;
      first = at;
    }
  }
  make_heap(keys + first, least - first);
  for (int64_t i = least; i < last; ++i)
    if (keys[i] > keys[first]) swap_keys(keys[i], keys[first]), sift_down(keys + first, least - first, 0);
  return least;
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
