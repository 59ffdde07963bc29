// The terms of the readings in the gradients of weights and scores. After masks.inl and load.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

template <int W>
struct ReadingTerms {
  static constexpr int lanes = W * N;
  const Forward& call;
  const ReadingGrads& given;
  const Queries& queries;
  float entropy[kMaxLanes], distance[kMaxLanes], position[kMaxLanes], cell[kMaxLanes];
  int64_t cell_row[kMaxLanes];
  float *mass, *scores;  // of each mass and lane; of each source of a tile and lane
  Ranges* ranges;        // of the edges of each mass

  ReadingTerms(const Backward& work, const Queries& queries, Arena& arena)
      : call(work.forward), given(work.readings), queries(queries) {
    mass = arena.take<float>(given.mass_count * lanes), ranges = arena.take<Ranges>(given.mass_count);
    scores = arena.take<float>(given.scores ? kTile * lanes : 0);
  }

  bool any() const {
    return given.entropy || given.distance || given.mass_count || given.scores || given.top || given.received ||
           given.rows || given.cells;
  }

  void start() {
    for (int64_t lane = 0, in = 0; lane < lanes; ++lane) {
      const bool real = lane < queries.count;
      entropy[lane] = given.entropy && real ? -given.entropy[queries.row(lane)] : 0;
      distance[lane] = given.distance && real ? given.distance[queries.row(lane)] : 0;
      position[lane] = (float)(queries.position(lane) + call.distance_offset);
      cell[lane] = 0;
      if (!given.cells) continue;
      while (real && queries.position(lane) >= call.query_edges[in + 1]) ++in;
      cell_row[lane] = in;
    }
    for (int64_t m = 0; m < given.mass_count; ++m) {
      ranges[m] = ranges_of(given.masses[m].edges, queries, lanes);
      for (int64_t lane = 0; lane < lanes; ++lane)
        mass[m * lanes + lane] = lane < queries.count ? given.masses[m].grad[queries.row(lane)] : 0;
    }
  }

  // Loads the gradients of a tile's final scores, 0 for lanes without a query.
  void load_scores(int64_t from, int64_t n) {
    if (queries.count < lanes) std::memset(scores, 0, sizeof(float) * n * lanes);
    transpose(given.scores + queries.row(0) * call.source + from, call.source, queries.count, n, scores, lanes);
  }

  // Adds the term of the entropy, from the logarithm of the weight; it vanishes where the weight underflows.
  f with_entropy(f grad, f log_weight, int j) const {
    if (!given.entropy) return grad;
    const f slope = Vec::add(Vec::max(Vec::set1(-1000.f), log_weight), Vec::set1(1.f));
    return Vec::fma(Vec::load(entropy + j), slope, grad);
  }

  // Adds all terms of a tile to the gradients of its weights, but for that of the entropy.
  void add(int64_t from, int64_t n, float* grads) {
    if (given.distance) add_distance(from, n, grads);
    for (int64_t m = 0; m < given.mass_count; ++m) add_mass(m, from, n, grads);
    if (given.top) add_top(from, n, grads);
    add_sums(from, n, grads);
  }

  // The readings whose row terms only the kernel can compute
  void add_sums(int64_t from, int64_t n, float* grads) {
    if (given.received) add_received(from, n, grads);
    if (given.rows) add_rows(from, n, grads);
    if (given.cells) add_cells(from, n, grads);
  }

  // The head among those of all samples
  int64_t head() const { return queries.batch * call.head + queries.head; }

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
    const Tile kind = tile_bits<W>(given.masses[m].edges, ranges[m], queries, from, n, edges);
    if (kind == Tile::empty) return;
    for (int64_t i = 0; i < n * W; ++i) {
      const int j = (int)(i % W) * N;
      const f x = Vec::load(mass + m * lanes + j);
      add_to(grads + i * N, kind == Tile::full ? x : Vec::select(edges[i / W] >> j, x, Vec::zero()));
    }
  }

  void add_top(int64_t from, int64_t n, float* grads) const {
    for (int64_t lane = 0; lane < queries.count; ++lane)
      for (int64_t k = queries.row(lane) * given.top_count; k < (queries.row(lane) + 1) * given.top_count; ++k) {
        const int64_t source = given.top_sources[k] - from;
        if (source >= 0 && source < n) grads[source * lanes + lane] += given.top[k];
      }
  }

  void add_received(int64_t from, int64_t n, float* grads) const {
    const float* received = given.received + head() * call.source + from;
    for (int64_t i = 0; i < n * W; ++i) add_to(grads + i * N, Vec::set1(received[i / W]));
  }

  void add_rows(int64_t from, int64_t n, float* grads) const {
    for (int64_t lane = 0; lane < queries.count; ++lane) {
      const int32_t place = call.row_of[queries.position(lane)];
      if (place < 0) continue;
      const float* grad = given.rows + (head() * call.row_count + place) * call.source + from;
      for (int64_t s = 0; s < n; ++s) grads[s * lanes + lane] += grad[s];
    }
  }

  void add_cells(int64_t from, int64_t n, float* grads) {
    const float* cells = given.cells + head() * call.query_cells * call.source_cells;
    int64_t column = 0, stop = from;
    for (int64_t s = 0; s < n; ++s) {
      if (from + s >= stop) {
        while (from + s >= call.source_edges[column + 1]) ++column;
        stop = call.source_edges[column + 1];
        for (int64_t lane = 0; lane < queries.count; ++lane)
          cell[lane] = cells[cell_row[lane] * call.source_cells + column];
      }
      for (int j = 0; j < W; ++j) add_to(grads + (s * W + j) * N, Vec::load(cell + j * N));
    }
  }
};

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
