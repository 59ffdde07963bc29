// Which lanes may read which source of a tile. After micro.inl and load.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// What the ranges of several queries have in common
struct CommonRange {
  int32_t first, last;            // outside [first, last) nothing is allowed
  int32_t full_first, full_last;  // inside [full_first, full_last) everything is
};

// One range of each query of a block, one query in each lane.
struct Range : CommonRange {
  int32_t start[kWide], stop[kWide];
  CommonRange vectors[Vec::wide];
};

struct Ranges {
  Range all[kMaxRanges];
  int64_t count, first, last;
};

inline int32_t min32(int32_t a, int32_t b) { return a < b ? a : b; }
inline int32_t max32(int32_t a, int32_t b) { return a > b ? a : b; }

inline __attribute__((always_inline)) CommonRange common_of(const int32_t* start, const int32_t* stop, int64_t lanes,
                                                            int32_t end) {
  CommonRange all = {end, 0, 0, end};
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int32_t from = start[lane], to = stop[lane];
    all.first = min32(all.first, from < to ? from : end), all.last = max32(all.last, from < to ? to : 0);
    all.full_first = max32(all.full_first, from), all.full_last = min32(all.full_last, to);
  }
  return all;
}

void fill_range(const int32_t* start, const int32_t* stop, int64_t count, int64_t lanes, int64_t source, Range& range) {
  const int32_t end = (int32_t)source;
  for (int64_t lane = 0; lane < min(count, lanes); ++lane) {
    const int32_t from = max32(0, min32(start[lane], end));
    range.start[lane] = from, range.stop[lane] = max32(from, min32(stop[lane], end));
  }
  for (int64_t lane = count; lane < lanes; ++lane)
    range.start[lane] = range.start[count - 1], range.stop[lane] = range.stop[count - 1];
  (CommonRange&)range = {end, 0, 0, end};
  for (int64_t at = 0; at < lanes; at += N) {
    const int32_t *from = range.start + at, *to = range.stop + at;
    // with a constant number of lanes this is a few instructions
    const CommonRange one = lanes - at >= N ? common_of(from, to, N, end) : common_of(from, to, lanes - at, end);
    range.vectors[at / N] = one;
    range.first = min32(range.first, one.first), range.last = max32(range.last, one.last);
    range.full_first = max32(range.full_first, one.full_first), range.full_last = min32(range.full_last, one.full_last);
  }
}

Ranges ranges_of(const Edges& mask, const Queries& queries, int64_t lanes) {
  const int64_t source = queries.call.source;
  Ranges result;
  result.count = mask.start ? mask.ranges : 0;
  result.first = mask.start ? source : 0, result.last = mask.start ? 0 : source;
  for (int64_t r = 0; r < result.count; ++r) {
    const int64_t offset =
        r * mask.range_stride + queries.batch * mask.range_batch + queries.head * mask.range_head + queries.first;
    Range& range = result.all[r];
    fill_range(mask.start + offset, mask.stop + offset, queries.count, lanes, source, range);
    result.first = min(result.first, range.first), result.last = max(result.last, range.last);
  }
  return result;
}

// The lanes of the vector at lane `at` whose range holds the source
inline uint64_t lanes_of(const Range& range, int64_t at, int64_t source) {
  const auto here = Vec::set1_int((int32_t)source);
  return Vec::greater_int(Vec::load_int(range.stop + at), here) &
         ~Vec::greater_int(Vec::load_int(range.start + at), here);
}

// Adds to bits[s] the lanes whose range holds source `first + s`.
template <int W>
void add_bits_of_range(const Range& range, int64_t first, int64_t count, uint64_t* bits) {
  for (int64_t s = 0; s < count; ++s) {
    uint64_t result = 0;
    for (int j = 0; j < W; ++j) result |= lanes_of(range, j * N, first + s) << (j * N);
    bits[s] |= result;
  }
}

void transpose_bits(uint64_t* rows) {  // 64 x 64, Hacker's Delight 7-3
  uint64_t mask = 0x00000000ffffffffull;
  for (int width = 32; width; width >>= 1, mask ^= mask << width)
    for (int k = 0; k < 64; k = (k + width + 1) & ~width) {
      const uint64_t swap = ((rows[k] >> width) ^ rows[k + width]) & mask;
      rows[k] ^= swap << width, rows[k + width] ^= swap;
    }
}

// Bit s is set where byte s is not zero.
inline uint64_t bits_of_row(const uint8_t* row, int64_t stride, int64_t count) {
  uint64_t result = 0;
  int64_t s = 0;
  for (; stride == 1 && s + 8 <= count; s += 8) {
    uint64_t eight;
    std::memcpy(&eight, row + s, 8);
    eight = (((eight & 0x7f7f7f7f7f7f7f7full) + 0x7f7f7f7f7f7f7f7full) | eight) >> 7 & 0x0101010101010101ull;
    result |= (eight * 0x0102040810204080ull >> 56) << s;
  }
  for (; s < count; ++s) result |= (uint64_t)(row[s * stride] != 0) << s;
  return result;
}

enum class Tile { empty, partial, full };

// Which lanes may read which source by the bytes, and also by what is in `bits` if `narrow`.
Tile bits_of_bytes(const Edges& mask, const Queries& queries, int64_t lanes, int64_t from, int64_t n, bool narrow,
                   uint64_t* bits) {
  uint64_t rows[64];
  const uint8_t* base = mask.bytes + queries.batch * mask.batch + queries.head * mask.head + from * mask.source;
  uint64_t seen = 0;
  for (int64_t lane = 0; lane < 64; ++lane) {
    const uint8_t* row = base + (queries.first + min(lane, queries.count - 1)) * mask.query;
    rows[lane] = lane < lanes ? bits_of_row(row, mask.source, n) : 0;
    seen |= rows[lane];
  }
  if (!seen) return Tile::empty;
  transpose_bits(rows);
  uint64_t any = 0, all = ~0ull;
  for (int64_t s = 0; s < n; ++s) {
    bits[s] = narrow ? rows[s] & bits[s] : rows[s];
    any |= bits[s], all &= bits[s];
  }
  if (!any) return Tile::empty;
  return (all & lane_mask(lanes)) == lane_mask(lanes) ? Tile::full : Tile::partial;
}

// Which lanes may read which source of the tile [from, from + n): fills `bits` unless the tile is full or empty.
template <int W>
Tile tile_bits(const Edges& mask, const Ranges& ranges, const Queries& queries, int64_t from, int64_t n,
               uint64_t* bits) {
  Tile result = ranges.count ? Tile::empty : Tile::full;
  for (int64_t r = 0; r < ranges.count; ++r) {
    const Range& range = ranges.all[r];
    if (from >= range.full_first && from + n <= range.full_last) {
      result = Tile::full;
      break;
    }
    if (from >= range.last || from + n <= range.first) continue;
    if (result == Tile::empty) std::memset(bits, 0, sizeof(uint64_t) * n);
    add_bits_of_range<W>(range, from, n, bits);
    result = Tile::partial;
  }
  if (result == Tile::empty) return result;
  if (mask.bytes) return bits_of_bytes(mask, queries, W * N, from, n, result == Tile::partial, bits);
  return result;
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
