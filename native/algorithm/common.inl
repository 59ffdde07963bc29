// What all parts of the algorithm share.
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int64_t kTile = 64;  // sources in a tile
constexpr int N = Vec::lanes;
constexpr int kWide = Vec::wide * N;         // queries in a block of the forward
constexpr int kMaxLanes = Vec::vectors * N;  // and of the backward
using f = Vec::f;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t padded(int64_t width) { return (width + N - 1) / N * N; }
inline int lowest_bit(uint32_t bits) { return __builtin_ctz(bits); }
inline uint32_t low_bits(int64_t count) { return (1u << count) - 1; }
inline uint64_t lane_mask(int64_t lanes) { return lanes >= 64 ? ~0ull : (1ull << lanes) - 1; }

constexpr double kLog2eWide = 0x1.71547652b82fep0;
constexpr float kLog2e = 0x1.715476p0f;
inline f exp_of(f x) { return Vec::exp2(Vec::mul(x, Vec::set1(kLog2e))); }

// Adds x to a sum, and the rounding error of the addition (two-sum of Knuth) to a second sum beside it: high + low
// stays exact to about one rounding, however many terms there are.
inline void add_exactly(float* high, float* low, f x) {
  const f old = Vec::load(high), sum = Vec::add(old, x);
  const f added = Vec::sub(sum, old), kept = Vec::sub(sum, added);
  Vec::store(high, sum);
  Vec::store(low, Vec::add(Vec::load(low), Vec::add(Vec::sub(old, kept), Vec::sub(x, added))));
}

// Tiles after which a running sum over the sources is added to an exact one, so that its error does not grow with their
// number. Calls with at most as many tiles have one running sum.
constexpr int64_t kFoldTiles = 32;

// The memory of one work item, handed out from one allocation; without a base it only counts the bytes.
struct Arena {
  char* base;
  size_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* result = base ? (T*)(base + used) : nullptr;
    used += ((size_t)count * sizeof(T) + 63) & ~(size_t)63;
    return result;
  }
};

// A block of neighbouring queries of one head, one query in each lane.
struct Queries {
  const Forward& call;
  int64_t batch, head, source_head, first, count;

  // The query of a lane among all queries of the call, of which this part may hold only some
  int64_t position(int64_t lane) const { return call.first_query + first + lane; }
  // Its place in the results per query
  int64_t row(int64_t lane) const { return (batch * call.head + head) * call.query_total + position(lane); }
};

inline Queries queries_of(const Forward& call, int64_t batch, int64_t head, int64_t first, int64_t count) {
  return {call, batch, head, head / (call.head / call.source_head), first, count};
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
