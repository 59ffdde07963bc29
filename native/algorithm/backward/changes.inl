// What the gradients of readings add to the gradient of each weight. After masks.inl and load.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

template <int W>
struct Changes {
  static constexpr int lanes = W * N;
  const Backward& work;
  const Forward& call;
  const Readings& given;
  int64_t batch, head, first, count;
  float entropy[kMaxLanes], distance[kMaxLanes], position[kMaxLanes], cell[kMaxLanes];
  int64_t cell_row[kMaxLanes];
  float *mass, *scores;  // of each mass and lane; of each source of a tile and lane
  Ranges* ranges;        // of the edges of each mass

  Changes(const Backward& work, Arena& arena) : work(work), call(work.forward), given(work.readings) {
    mass = arena.take<float>(given.mass_count * lanes), ranges = arena.take<Ranges>(given.mass_count);
    scores = arena.take<float>(given.scores ? kTile * lanes : 0);
  }

  bool any() const {
    return given.entropy || given.distance || given.mass_count || given.scores || given.top || given.received ||
           given.rows || given.cells;
  }

  int64_t row(int64_t lane) const {
    return (batch * call.head + head) * call.query_total + call.first_query + first + lane;
  }

  void start(int64_t at_batch, int64_t at_head, int64_t at_first, int64_t of_count) {
    batch = at_batch, head = at_head, first = at_first, count = of_count;
    for (int64_t lane = 0, in = 0; lane < lanes; ++lane) {
      const bool real = lane < count;
      entropy[lane] = given.entropy && real ? -given.entropy[row(lane)] : 0;
      distance[lane] = given.distance && real ? given.distance[row(lane)] : 0;
      position[lane] = (float)(call.first_query + first + lane + call.distance_offset);
      cell[lane] = 0;
      if (!given.cells) continue;
      while (real && call.first_query + first + lane >= call.query_edges[in + 1]) ++in;
      cell_row[lane] = in;
    }
    for (int64_t m = 0; m < given.mass_count; ++m) {
      ranges[m] = ranges_of(given.masses[m].edges, batch, head, first, count, lanes, call.source);
      for (int64_t lane = 0; lane < lanes; ++lane)
        mass[m * lanes + lane] = lane < count ? given.masses[m].change[row(lane)] : 0;
    }
  }

  // Fills the gradients of a tile's final scores, 0 for lanes without a query.
  void load_scores(int64_t from, int64_t n) {
    if (count < lanes) std::memset(scores, 0, sizeof(float) * n * lanes);
    transpose(given.scores + row(0) * call.source + from, call.source, count, n, scores, lanes);
  }

  // The entropy's share, from the logarithm of the weight; a weight that underflows has none.
  f with_entropy(f grad, f log_weight, int j) const {
    if (!given.entropy) return grad;
    const f change = Vec::add(Vec::max(Vec::set1(-1000.f), log_weight), Vec::set1(1.f));
    return Vec::fma(Vec::load(entropy + j), change, grad);
  }

  void add(int64_t from, int64_t n, float* grads) {
    if (given.distance) add_distance(from, n, grads);
    for (int64_t m = 0; m < given.mass_count; ++m) add_mass(m, from, n, grads);
    if (given.top) add_top(from, n, grads);
    add_sums(from, n, grads);
  }

  void add_sums(int64_t from, int64_t n, float* grads) {
    if (given.received) add_received(from, n, grads);
    if (given.rows) add_rows(from, n, grads);
    if (given.cells) add_cells(from, n, grads);
  }

  static void add_to(float* place, f x) { Vec::store(place, Vec::add(Vec::load(place), x)); }

  void add_distance(int64_t from, int64_t n, float* grads) const {
    for (int64_t i = 0; i < n * W; ++i) {
      const int j = (int)(i % W) * N;
      const f apart = Vec::sub(Vec::load(position + j), Vec::set1((float)(from + i / W)));
      const f far = Vec::max(apart, Vec::sub(Vec::zero(), apart));
      add_to(grads + i * N, Vec::mul(Vec::load(distance + j), far));
    }
  }

  void add_mass(int64_t m, int64_t from, int64_t n, float* grads) const {
    uint64_t edges[kTile];
    const Tile kind = tile_bits<W>(given.masses[m].edges, ranges[m], batch, head, first, count, from, n, edges);
    if (kind == Tile::empty) return;
    for (int64_t i = 0; i < n * W; ++i) {
      const int j = (int)(i % W) * N;
      const f x = Vec::load(mass + m * lanes + j);
      add_to(grads + i * N, kind == Tile::full ? x : Vec::select(edges[i / W] >> j, x, Vec::zero()));
    }
  }

  void add_top(int64_t from, int64_t n, float* grads) const {
    for (int64_t lane = 0; lane < count; ++lane)
      for (int64_t k = row(lane) * given.top_count; k < (row(lane) + 1) * given.top_count; ++k) {
        const int64_t source = given.top_sources[k] - from;
        if (source >= 0 && source < n) grads[source * lanes + lane] += given.top[k];
      }
  }

  void add_received(int64_t from, int64_t n, float* grads) const {
    const float* received = given.received + (batch * call.head + head) * call.source + from;
    for (int64_t i = 0; i < n * W; ++i) add_to(grads + i * N, Vec::set1(received[i / W]));
  }

  void add_rows(int64_t from, int64_t n, float* grads) const {
    for (int64_t lane = 0; lane < count; ++lane) {
      const int32_t place = call.row_of[call.first_query + first + lane];
      if (place < 0) continue;
      const float* change = given.rows + ((batch * call.head + head) * call.row_count + place) * call.source + from;
      for (int64_t s = 0; s < n; ++s) grads[s * lanes + lane] += change[s];
    }
  }

  void add_cells(int64_t from, int64_t n, float* grads) {
    const float* cells = given.cells + (batch * call.head + head) * call.query_cells * call.source_cells;
    int64_t column = 0, stop = from;
    for (int64_t s = 0; s < n; ++s) {
      if (from + s >= stop) {
        while (from + s >= call.source_edges[column + 1]) ++column;
        stop = call.source_edges[column + 1];
        for (int64_t lane = 0; lane < count; ++lane) cell[lane] = cells[cell_row[lane] * call.source_cells + column];
      }
      for (int j = 0; j < W; ++j) add_to(grads + (s * W + j) * N, Vec::load(cell + j * N));
    }
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
