// What all parts of the algorithm share.
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int64_t kTile = 64;  // sources a tile
constexpr int kShortTop = 8;   // top lists up to this length stay in registers
constexpr int N = Vec::lanes;
constexpr int kMaxLanes = Vec::vectors * N;
constexpr int kWide = Vec::wide * N;  // queries a block of the forward
using f = Vec::f;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr double kLog2eWide = 0x1.71547652b82fep0;
constexpr float kLog2e = 0x1.715476p0f;
inline f exp_of(f x) { return Vec::exp2(Vec::mul(x, Vec::set1(kLog2e))); }

// Memory of one work item, handed out from one block; with no base it only counts.
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

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
