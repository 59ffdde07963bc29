// Which lanes may read which source of a tile. After micro.inl and load.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// What several queries have in common of a range
struct Common {
  int32_t first, last;            // outside [first, last) nothing is allowed
  int32_t full_first, full_last;  // inside [full_first, full_last) everything is
};

// Some range of each query of a block, one lane each.
struct Range : Common {
  int32_t start[kWide], stop[kWide];
  Common vectors[Vec::wide];
};

struct Ranges {
  Range all[kMaxRanges];
  int64_t count, first, last;
};

inline int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
inline int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

inline __attribute__((always_inline)) Common common_of(const int32_t* start, const int32_t* stop, int64_t lanes,
                                                       int32_t end) {
  Common all = {end, 0, 0, end};
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int32_t from = start[lane], to = stop[lane];
    all.first = least(all.first, from < to ? from : end), all.last = most(all.last, from < to ? to : 0);
    all.full_first = most(all.full_first, from), all.full_last = least(all.full_last, to);
  }
  return all;
}

void fill_range(const int32_t* start, const int32_t* stop, int64_t count, int64_t lanes, int64_t source, Range& range) {
  const int32_t end = (int32_t)source;
  for (int64_t lane = 0; lane < min(count, lanes); ++lane) {
    const int32_t from = most(0, least(start[lane], end));
    range.start[lane] = from, range.stop[lane] = most(from, least(stop[lane], end));
  }
  for (int64_t lane = count; lane < lanes; ++lane)
    range.start[lane] = range.start[count - 1], range.stop[lane] = range.stop[count - 1];
  (Common&)range = {end, 0, 0, end};
  for (int64_t at = 0; at < lanes; at += N) {
    const int32_t *from = range.start + at, *to = range.stop + at;
    // a constant number of lanes is a few instructions
    const Common one = lanes - at >= N ? common_of(from, to, N, end) : common_of(from, to, lanes - at, end);
    range.vectors[at / N] = one;
    range.first = least(range.first, one.first), range.last = most(range.last, one.last);
    range.full_first = most(range.full_first, one.full_first), range.full_last = least(range.full_last, one.full_last);
  }
}

Ranges ranges_of(const Edges& mask, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t lanes,
                 int64_t source) {
  Ranges result;
  result.count = mask.start ? mask.ranges : 0;
  result.first = mask.start ? source : 0, result.last = mask.start ? 0 : source;
  for (int64_t r = 0; r < result.count; ++r) {
    const int64_t offset = r * mask.range_step + batch * mask.range_batch + head * mask.range_head + first;
    Range& range = result.all[r];
    fill_range(mask.start + offset, mask.stop + offset, count, lanes, source, range);
    result.first = min(result.first, range.first), result.last = max(result.last, range.last);
  }
  return result;
}

// The lanes of a vector that may read a source by this range
inline uint64_t lanes_of(const Range& range, int64_t at, int64_t source) {
  const auto here = Vec::set1_int((int32_t)source);
  return Vec::greater_int(Vec::load_int(range.stop + at), here) &
         ~Vec::greater_int(Vec::load_int(range.start + at), here);
}

// Sets in bits[s] the lanes that may read source `first + s` by this range
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

inline uint64_t lane_mask(int64_t lanes) { return lanes >= 64 ? ~0ull : (1ull << lanes) - 1; }

// The same from one byte an edge, and-ed to what is in `bits` if `narrow`.
Tile bits_of_bytes(const Edges& mask, int64_t batch, int64_t head, int64_t query, int64_t queries, int64_t lanes,
                   int64_t first, int64_t count, bool narrow, uint64_t* bits) {
  uint64_t rows[64];
  const uint8_t* base = mask.bytes + batch * mask.batch + head * mask.head + first * mask.source;
  uint64_t seen = 0;
  for (int64_t lane = 0; lane < 64; ++lane) {
    const uint8_t* row = base + (query + min(lane, queries - 1)) * mask.query;
    rows[lane] = lane < lanes ? bits_of_row(row, mask.source, count) : 0;
    seen |= rows[lane];
  }
  if (!seen) return Tile::empty;
  transpose_bits(rows);
  uint64_t any = 0, all = ~0ull;
  for (int64_t s = 0; s < count; ++s) {
    bits[s] = narrow ? rows[s] & bits[s] : rows[s];
    any |= bits[s], all &= bits[s];
  }
  if (!any) return Tile::empty;
  return (all & lane_mask(lanes)) == lane_mask(lanes) ? Tile::full : Tile::partial;
}

// Which lanes may read which source of a tile, `bits` filled unless everything is allowed.
template <int W>
Tile tile_bits(const Edges& mask, const Ranges& ranges, int64_t batch, int64_t head, int64_t query, int64_t queries,
               int64_t first, int64_t count, uint64_t* bits) {
  Tile result = ranges.count ? Tile::empty : Tile::full;
  for (int64_t r = 0; r < ranges.count; ++r) {
    const Range& range = ranges.all[r];
    if (first >= range.full_first && first + count <= range.full_last) {
      result = Tile::full;
      break;
    }
    if (first >= range.last || first + count <= range.first) continue;
    if (result == Tile::empty) std::memset(bits, 0, sizeof(uint64_t) * count);
    add_bits_of_range<W>(range, first, count, bits);
    result = Tile::partial;
  }
  if (result == Tile::empty) return result;
  if (mask.bytes)
    return bits_of_bytes(mask, batch, head, query, queries, W * N, first, count, result == Tile::partial, bits);
  return result;
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
