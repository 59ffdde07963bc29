// The weights of a block of queries, and the readings that need their final values. After softmax.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

bool needs_strip(const Forward& call) {
  return call.received || call.cell_sum || call.distance || call.mass || call.rows;
}

// Holds the tile at hand or, where a reading needs them, all tiles that the block visits, each with the running
// maximum that its weights refer to: one pass at the end normalizes and reads them.
template <int W>
struct Strip {
  static constexpr int lanes = W * N;
  const Forward& call;
  const Queries& queries;
  const int64_t slot;  // of the sums over queries
  const bool whole;    // all tiles are held

  Strip(const Queries& queries, int64_t slot, Arena& arena)
      : call(queries.call), queries(queries), slot(slot), whole(needs_strip(call)) {
    const int64_t limit = whole ? call.source / kTile + 2 : 0;
    weights = arena.take<float>((whole ? limit * kTile : kTile) * lanes);
    tile_max = arena.take<float>(limit * lanes);
    tile_first = arena.take<int64_t>(limit), tile_count = arena.take<int64_t>(limit);
  }

  void start() { tiles = 0; }

  // Where the scores of the next tile go
  float* next() { return weights + (whole ? tiles * kTile * lanes : 0); }

  void push(int64_t from, int64_t n, const float* row_max) {
    if (!whole) return;
    std::memcpy(tile_max + tiles * lanes, row_max, sizeof(float) * lanes);
    tile_first[tiles] = from, tile_count[tiles] = n;
    ++tiles;
  }

  // Normalizes the weights and reads them.
  void read(const OnlineSoftmax<W>& softmax, TileParts<W>& parts) {
    Totals totals;
    alignas(64) float factor[lanes];
    int64_t cell = 0;
    for (first_cell = 0; call.cell_sum && queries.position(0) >= call.query_edges[first_cell + 1];) ++first_cell;
    const bool has_nan = !all_finite({softmax.row_sum, lanes}, 1, lanes);
    for (int64_t t = 0; t < tiles; ++t) {
      find_factor(softmax, t, factor);
      float* tile = weights + t * kTile * lanes;
      if (has_nan || call.rows || call.distance || call.mass) {
        for (int64_t i = 0; i < tile_count[t] * W; ++i)
          Vec::store(tile + i * N, Vec::mul(Vec::load(tile + i * N), Vec::load(factor + i % W * N)));
        for (int lane = 0; lane < lanes; ++lane) factor[lane] = 1;
        if (has_nan) clear_blocked(tile, t, parts);
        if (call.rows) write_rows(tile, t);
        if (call.distance) add_distance(tile, t, totals.distance);
        if (call.mass) add_mass(tile, t, totals.mass);
      }
      if (call.received && call.cell_sum) cell = add_sums<true, true>(tile, factor, t, cell, totals);
      else if (call.received) add_sums<true, false>(tile, factor, t, 0, totals);
      else if (call.cell_sum) cell = add_sums<false, true>(tile, factor, t, cell, totals);
    }
    if (call.cell_sum && tiles) flush_cell(cell, totals);
    for (int64_t lane = 0; lane < queries.count; ++lane) {
      if (call.distance) call.distance[queries.row(lane)] = totals.distance.value(lane);
      if (call.mass) call.mass[queries.row(lane)] = totals.mass.value(lane);
    }
  }

 private:
  // A sum of each row, to which each tile adds one partial sum.
  struct RowSums {
    alignas(64) float high[lanes] = {}, low[lanes] = {};
    void add(int at, f x) { add_exactly(high + at, low + at, x); }
    float value(int64_t lane) const { return high[lane] + low[lane]; }
  };

  // Of each row so far; of the cells, those of the column of cells at hand
  struct Totals {
    RowSums distance, mass, cell_sum;
    alignas(64) float cell_max[lanes] = {};
    bool some_cells = false;
  };

  float* weights;   // [tile][source][lane], not normalized
  float* tile_max;  // [tile][lane]
  int64_t *tile_first, *tile_count, tiles = 0;
  int64_t first_cell;  // the row of cells of the first query

  // What normalizes the weights of a tile; 0 for lanes without a query
  void find_factor(const OnlineSoftmax<W>& softmax, int64_t t, float* factor) const {
    for (int at = 0; at < lanes; at += N) {
      const f below = Vec::sub(Vec::load(tile_max + t * lanes + at), Vec::load(softmax.row_max + at));
      Vec::store(factor + at, Vec::mul(softmax.exponent.exp(below), Vec::load(softmax.rescale + at)));
    }
    for (int64_t lane = queries.count; lane < lanes; ++lane) factor[lane] = 0;
  }

  // What a tile adds to the weight that its sources receive, and to the cells of the block map.
  template <bool received, bool cells>
  int64_t add_sums(const float* tile, const float* factor, int64_t t, int64_t cell, Totals& totals) {
    const int64_t head = (slot * call.batch + queries.batch) * call.head + queries.head;
    float* to = received ? call.received + head * call.source + tile_first[t] : nullptr;
    f partial[kTile];
    int64_t s = 0;
    while (s < tile_count[t]) {
      int64_t stop = tile_count[t];
      if (cells) {
        for (; tile_first[t] + s >= call.source_edges[cell + 1]; ++cell) flush_cell(cell, totals);
        totals.some_cells = true;
        stop = min(stop, call.source_edges[cell + 1] - tile_first[t]);
      }
      f times[W], total[W], best[W];
      for (int j = 0; j < W; ++j)
        times[j] = Vec::load(factor + j * N), total[j] = Vec::zero(), best[j] = Vec::load(totals.cell_max + j * N);
      for (; s < stop; ++s) {
        f across = Vec::zero();
        for (int j = 0; j < W; ++j) {
          const f weight = Vec::mul(Vec::load(tile + (s * W + j) * N), times[j]);
          if (cells) total[j] = Vec::add(total[j], weight), best[j] = Vec::max(best[j], weight);
          if (received) across = Vec::add(across, weight);
        }
        if (received) partial[s] = across;
      }
      for (int j = 0; cells && j < W; ++j)
        totals.cell_sum.add(j * N, total[j]), Vec::store(totals.cell_max + j * N, best[j]);
    }
    for (s = 0; received && s + N <= tile_count[t]; s += N)
      Vec::store(to + s, Vec::add(Vec::load(to + s), Vec::sum_each(partial + s)));
    for (; received && s < tile_count[t]; ++s) to[s] += Vec::sum(partial[s]);
    return cell;
  }

  // A row that reads a NaN has weights of NaN, but only at the sources that it may read.
  void clear_blocked(float* tile, int64_t t, TileParts<W>& parts) {
    if (parts.find_bits(tile_first[t], tile_count[t]) != Tile::partial) return;
    for (int64_t i = 0; i < tile_count[t] * W; ++i) {
      const uint64_t allowed = parts.bits[i / W] >> (i % W * N);
      Vec::store(tile + i * N, Vec::select(allowed, Vec::load(tile + i * N), Vec::zero()));
    }
  }

  void write_rows(const float* tile, int64_t t) {
    for (int64_t lane = 0; lane < queries.count; ++lane) {
      const int32_t place = call.row_of[queries.position(lane)];
      if (place < 0) continue;
      const int64_t row = (queries.batch * call.head + queries.head) * call.row_count + place;
      float* to = call.rows + row * call.source + tile_first[t];
      for (int64_t s = 0; s < tile_count[t]; ++s) to[s] = tile[s * lanes + lane];
    }
  }

  // Calls term(source of the tile, vector), and adds up what it returns: every fourth source goes to one of four sums,
  // so that few roundings happen in each.
  template <class Term>
  void add_tile(int64_t t, RowSums& to, Term term) {
    const int64_t n = tile_count[t];
    for (int j = 0; j < W; ++j) {
      f sum[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
      int64_t s = 0;
      for (; s + 4 <= n; s += 4)
        CLEARHEAD_UNROLL_FOR (int k = 0; k < 4; ++k) sum[k] = Vec::add(sum[k], term(s + k, j));
      for (; s < n; ++s) sum[s % 4] = Vec::add(sum[s % 4], term(s, j));
      to.add(j * N, Vec::add(Vec::add(sum[0], sum[1]), Vec::add(sum[2], sum[3])));
    }
  }

  void add_distance(const float* tile, int64_t t, RowSums& distance) {
    alignas(64) float from[lanes];  // the first source of the tile
    for (int lane = 0; lane < lanes; ++lane)
      from[lane] = (float)(queries.position(lane) + call.distance_offset - tile_first[t]);
    add_tile(t, distance, [&](int64_t s, int j) {
      const f far = Vec::sub(Vec::load(from + j * N), Vec::set1((float)s));
      return Vec::mul(Vec::load(tile + (s * W + j) * N), Vec::max(far, Vec::sub(Vec::zero(), far)));
    });
  }

  void add_mass(const float* tile, int64_t t, RowSums& mass) {
    const Ranges ranges = ranges_of(call.mass_edges, queries, lanes);
    uint64_t edges[kTile];
    const Tile kind = tile_bits<W>(call.mass_edges, ranges, queries, tile_first[t], tile_count[t], edges);
    if (kind == Tile::empty) return;
    add_tile(t, mass, [&](int64_t s, int j) {
      const f weight = Vec::load(tile + (s * W + j) * N);
      return kind == Tile::full ? weight : Vec::select(edges[s] >> (j * N), weight, Vec::zero());
    });
  }

  // Adds a column of cells to the results, and begins the next one.
  void flush_cell(int64_t cell, Totals& totals) {
    if (!totals.some_cells) return;
    int64_t row = first_cell;
    const float* most = totals.cell_max;
    const int64_t base = ((slot * call.batch + queries.batch) * call.head + queries.head) * call.query_cells;
    for (int64_t lane = 0; lane < queries.count; ++row) {
      const int64_t place = (base + row) * call.source_cells + cell;
      double sum = 0;
      for (; lane < queries.count && queries.position(lane) < call.query_edges[row + 1]; ++lane) {
        sum += totals.cell_sum.value(lane);
        if (sum != sum) call.cell_max[place] = (float)sum;
        else if (most[lane] > call.cell_max[place]) call.cell_max[place] = most[lane];
      }
      call.cell_sum[place] += (float)sum;
    }
    totals.cell_sum = {}, totals.some_cells = false;
    std::memset(totals.cell_max, 0, sizeof totals.cell_max);
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
