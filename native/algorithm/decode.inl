// Few queries over many sources, as in decoding: reading K and V is all the work there is. Features
// lie in the lanes, the sources are split into chunks with partial results of their own, and these
// are merged in order. Query heads that share a source head read it together.
// After forward.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int64_t kFewQueries = 4, kManySources = 128;
// Sources at a time: short turns of K and V, so that the one is on its way while the other is worked on.
constexpr int64_t kFewTile = 32;

bool is_few(const Forward& call) {
  return call.query_total <= kFewQueries && call.source >= kManySources && call.mask.ranges <= 1 && !call.dropout.least;
}

// Chunks of sources a source head: enough items for many threads, whatever their number is.
int64_t few_chunks(const Forward& call) {
  const int64_t wanted = 64 / (call.batch * call.source_head) + 1;
  return max(1, min(wanted, call.source / 256));
}

int64_t few_rows(const Forward& call) { return call.head / call.source_head * call.query; }

// floats of partial results a row: running maximum and sum, the sum in lanes, and the context so far
int64_t few_stride(const Forward& call) { return (call.value_dim + N - 1) / N * N + 2 * N; }

int64_t few_partial(const Forward& call) {
  return call.batch * call.source_head * few_chunks(call) * few_rows(call) * few_stride(call);
}

struct Few {
  const Forward& call;
  int64_t span;  // of the sources at hand, in whole vectors
  int64_t batch, source_head, key_width, value_width, rows, group;
  float *queries, *keys, *values, *weights;
  int64_t *start, *stop;
  uint8_t* blocked;

  Few(const Forward& call, Arena& arena) : call(call) {
    rows = few_rows(call), group = call.head / call.source_head;
    key_width = (call.head_dim + N - 1) / N * N, value_width = (call.value_dim + N - 1) / N * N;
    queries = arena.take<float>(rows * key_width);
    keys = arena.take<float>(kFewTile * key_width), values = arena.take<float>(kFewTile * value_width);
    weights = arena.take<float>(kFewTile);
    start = arena.take<int64_t>(rows), stop = arena.take<int64_t>(rows);
    blocked = arena.take<uint8_t>(kFewTile);
  }

  // Rows of K or V, read in their own type where whole vectors fit, or a padded copy in fp32.
  struct Source {
    const char* data;
    int64_t stride;  // in elements
    Type type;
  };

  Source source_rows(const View& view, int64_t head, int64_t first, int64_t count, int64_t width, int64_t padded,
                     float* copy) {
    if (width == padded) return {at(view, call.type, batch, head, first), view.position, call.type};
    const Rows rows = whole_rows(view, head, first, count, width, padded, copy);
    return {(const char*)rows.data, rows.stride, Type::f32};
  }

  template <Type type>
  static f load(const Source& rows, int64_t row, int64_t i) {
    if (type == Type::f32) return Vec::load((const float*)rows.data + row * rows.stride + i);
    return Vec::load_as_float((const uint16_t*)rows.data + row * rows.stride + i, type);
  }

  // Rows as whole vectors of fp32: where they lie if that fits, or a padded copy.
  Rows whole_rows(const View& view, int64_t head, int64_t first, int64_t count, int64_t width, int64_t padded,
                  float* copy) {
    if (call.type == Type::f32 && width == padded)
      return {(const float*)at(view, call.type, batch, head, first), view.position};
    for (int64_t r = 0; r < count; ++r) {
      const char* from = at(view, call.type, batch, head, first + r);
      float* to = copy + r * padded;
      if (call.type == Type::f32) std::memcpy(to, from, sizeof(float) * width);
      else to_float((const uint16_t*)from, width, call.type, to);
      for (int64_t i = width; i < padded; ++i) to[i] = 0;
    }
    return {copy, padded};
  }

  void load_queries() {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t head = source_head * group + r / call.query, query = r % call.query;
      const Rows row = whole_rows(call.q, head, query, 1, call.head_dim, key_width, queries + r * key_width);
      if (row.data != queries + r * key_width)
        std::memcpy(queries + r * key_width, row.data, sizeof(float) * key_width);
      const Ranges range = ranges_of(call.mask, batch, head, query, 1, 1, call.source);
      start[r] = range.first, stop[r] = range.last;
    }
  }

  void run(int64_t first, int64_t last, float* partial) {
    load_queries();
    int64_t from = last, to = first;
    for (int64_t r = 0; r < rows; ++r) {
      float* part = partial + r * few_stride(call);
      part[0] = -FLT_MAX;
      std::memset(part + 1, 0, sizeof(float) * (few_stride(call) - 1));
      if (start[r] < stop[r]) from = min(from, start[r]), to = max(to, stop[r]);
    }
    from = max(from, first), to = min(to, last);
    for (; from < to; from += kFewTile) {
      const int64_t n = min(kFewTile, to - from);
      span = (n + N - 1) / N * N;
      const Source k = source_rows(call.k, source_head, from, n, call.head_dim, key_width, keys);
      const Source v = source_rows(call.v, source_head, from, n, call.value_dim, value_width, values);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t low = max(start[r], from) - from, high = min(stop[r], from + n) - from;
        if (low >= high) continue;
        float* part = partial + r * few_stride(call);
        if (k.type == Type::f32) score_rows<Type::f32>(queries + r * key_width, k, low, high);
        else if (k.type == Type::bf16) score_rows<Type::bf16>(queries + r * key_width, k, low, high);
        else score_rows<Type::f16>(queries + r * key_width, k, low, high);
        const bool masked = edit_row(r, from, low, high);
        soften(part);
        if (v.type == Type::f32) add_rows<Type::f32>(v, low, high, masked, part + 2 * N);
        else if (v.type == Type::bf16) add_rows<Type::bf16>(v, low, high, masked, part + 2 * N);
        else add_rows<Type::f16>(v, low, high, masked, part + 2 * N);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* part = partial + r * few_stride(call);
      part[1] = Vec::sum(Vec::load(part + N));
    }
  }

  // Scores become unnormalised weights.
  void soften(float* part) {
    f most = Vec::set1(part[0]);
    for (int64_t s = 0; s < span; s += N) most = Vec::max(Vec::load(weights + s), most);
    if (Vec::greater(most, Vec::set1(part[0]))) shrink(part, most);
    f sum = Vec::load(part + N);
    for (int64_t s = 0; s < span; s += N) {
      const f weight = exp_of(Vec::sub(Vec::load(weights + s), Vec::set1(part[0])));
      sum = Vec::add(sum, weight);
      Vec::store(weights + s, weight);
    }
    Vec::store(part + N, sum);
  }

  // A new maximum: what was summed so far counts less. Rare after the first sources.
  void shrink(float* part, f most) {
    float top[N];
    Vec::store(top, most);
    float now = part[0];
    for (int i = 0; i < N; ++i) now = top[i] > now ? top[i] : now;
    const f share = exp_of(Vec::set1(part[0] - now));
    for (int64_t i = N; i < few_stride(call); i += N) Vec::store(part + i, Vec::mul(Vec::load(part + i), share));
    part[0] = now;
  }

  template <Type type>
  void add_rows(const Source& v, int64_t low, int64_t high, bool masked, float* out) {
    int64_t i = 0;
    for (; i + 8 * N <= value_width; i += 8 * N) add_values<type, 8>(v, low, high, masked, i, out + i);
    for (; i + 4 * N <= value_width; i += 4 * N) add_values<type, 4>(v, low, high, masked, i, out + i);
    for (; i < value_width; i += N) add_values<type, 1>(v, low, high, masked, i, out + i);
  }

  // The usual widths as constants.
  template <Type type>
  void score_rows(const float* q, const Source& k, int64_t low, int64_t high) {
    if (key_width == 64) score<type, 64 / N>(q, k, low, high);
    else if (key_width == 128) score<type, 128 / N>(q, k, low, high);
    else score<type, 0>(q, k, low, high);
  }

  // weights[s] = q . k[s] for low <= s < high, -inf elsewhere
  template <Type type, int V>
  void score(const float* q, const Source& k, int64_t low, int64_t high) {
    f query[V + 1];
    CLEARHEAD_UNROLL_FOR (int i = 0; i < V; ++i) query[i] = Vec::load(q + i * N);
    for (int64_t s = 0; s < span; s += N) {
      if (s + N <= low || s >= high) {
        Vec::store(weights + s, Vec::set1(-INFINITY));
        continue;
      }
      f sum[N];
      if (s + N <= high) {
        CLEARHEAD_UNROLL_FOR (int j = 0; j < N; ++j) sum[j] = products<type, V>(q, query, k, s + j);
      } else {
        for (int j = 0; j < N; ++j) sum[j] = products<type, V>(q, query, k, min(s + j, high - 1));
      }
      Vec::store(weights + s, Vec::mul(Vec::sum_each(sum), Vec::set1(call.scale)));
      for (int64_t j = s; (s < low || s + N > high) && j < s + N; ++j)
        if (j < low || j >= high) weights[j] = -INFINITY;
    }
  }

  // A row of K times the query, which is at hand in V vectors or, with V = 0, in memory alone.
  template <Type type, int V>
  f products(const float* q, const f* query, const Source& k, int64_t row) {
    f sum = Vec::mul(load<type>(k, row, 0), V ? query[0] : Vec::load(q));
    CLEARHEAD_UNROLL_FOR (int i = 1; i < V; ++i) sum = Vec::fma(load<type>(k, row, i * N), query[i], sum);
    for (int64_t i = N; !V && i < key_width; i += N) sum = Vec::fma(load<type>(k, row, i), Vec::load(q + i), sum);
    return sum;
  }

  // softcap, bias and single blocked edges; true if there are any of these
  bool edit_row(int64_t r, int64_t from, int64_t low, int64_t high) {
    const int64_t head = source_head * group + r / call.query, query = r % call.query;
    if (call.softcap != 0)
      for (int64_t s = 0; s < span; s += N) {
        const f cap = Vec::set1(call.softcap);
        const f bent = Vec::mul(cap, tanh_of(Vec::mul(Vec::load(weights + s), Vec::set1(1 / call.softcap))));
        Vec::store(weights + s, bent);
      }
    for (int64_t s = 0; call.softcap != 0 && s < span; ++s)
      if (s < low || s >= high) weights[s] = -INFINITY;
    if (!call.bias.data && !call.mask.bytes) return false;
    const Bias& b = call.bias;
    const float* bias = b.data ? b.data + batch * b.batch + head * b.head + query * b.query + from * b.source : nullptr;
    const Edges& m = call.mask;
    const uint8_t* bytes =
        m.bytes ? m.bytes + batch * m.batch + head * m.head + query * m.query + from * m.source : nullptr;
    bool any = false;
    for (int64_t s = low; s < high; ++s) {
      blocked[s] = (bytes && !bytes[s * m.source]) || (bias && bias[s * b.source] == -INFINITY);
      if (blocked[s]) weights[s] = -INFINITY;
      else if (bias) weights[s] += bias[s * b.source];
      any |= blocked[s];
    }
    return any;
  }

  template <Type type, int V>
  void add_values(const Source& v, int64_t low, int64_t high, bool masked, int64_t at, float* out) {
    f sum[V];
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) sum[j] = Vec::zero();
    for (int64_t s = low; s < high; ++s) {
      if (masked && blocked[s]) continue;
      const f weight = Vec::set1(weights[s]);
      CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) sum[j] = Vec::fma(weight, load<type>(v, s, at + j * N), sum[j]);
    }
    CLEARHEAD_UNROLL_FOR (int j = 0; j < V; ++j) Vec::store(out + j * N, Vec::add(Vec::load(out + j * N), sum[j]));
  }

  // One row from its partial results, in the order of the chunks.
  void merge(int64_t r, const float* partial, int64_t chunks) {
    const int64_t head = source_head * group + r / call.query, query = r % call.query, stride = few_stride(call);
    float most = call.sinks && call.sinks[head] > -FLT_MAX ? call.sinks[head] : -FLT_MAX;
    for (int64_t c = 0; c < chunks; ++c) {
      const float part = partial[(c * rows + r) * stride];
      most = part > most ? part : most;
    }
    float total = call.sinks ? std::exp(call.sinks[head] - most) : 0;
    for (int64_t i = 0; i < call.value_dim; ++i) values[i] = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      const float* part = partial + (c * rows + r) * stride;
      const float share = part[1] == 0 ? 0 : std::exp(part[0] - most);
      if (part[1] == 0) continue;
      total += share * part[1];
      for (int64_t i = 0; i < call.value_dim; ++i) values[i] += share * part[2 * N + i];
    }
    char* to = (char*)at(call.out, call.type, batch, head, query);
    const Ranges range = ranges_of(call.mask, batch, head, query, 1, 1, call.source);
    bool odd = is_odd_row(call, most, total, !call.mask.bytes && !call.bias.data && range.first < range.last);
    for (int64_t i = 0; i < call.value_dim; ++i) {
      const float value = total == 0 ? 0 : values[i] / total;
      odd |= !(std::fabs(value) <= FLT_MAX);
      if (call.type == Type::f32) ((float*)to)[i] = value;
      else ((uint16_t*)to)[i] = to_half(value, call.type);
    }
    if (call.odd && odd) call.odd->store(true, std::memory_order_relaxed);
    const int64_t place = (batch * call.head + head) * call.query_total + call.first_query + query;
    if (call.lse) call.lse[place] = total == 0 ? -INFINITY : most + std::log(total);
    if (call.row_max) call.row_max[place] = total == 0 ? 0 : most, call.row_scale[place] = total == 0 ? 0 : 1 / total;
  }
};

// Work item: one chunk of the sources of one source head.
void few_item(const Forward& call, int64_t item, float* partial, char* scratch) {
  Arena arena{scratch};
  Few few(call, arena);
  const int64_t chunks = few_chunks(call), chunk = item % chunks, row = item / chunks;
  few.batch = row / call.source_head, few.source_head = row % call.source_head;
  const int64_t size = ((call.source + chunks - 1) / chunks + kTile - 1) / kTile * kTile;
  few.run(min(chunk * size, call.source), min((chunk + 1) * size, call.source),
          partial + item * few.rows * few_stride(call));
}

void few_merge(const Forward& call, int64_t item, const float* partial, char* scratch) {
  Arena arena{scratch};
  Few few(call, arena);
  const int64_t chunks = few_chunks(call);
  few.batch = item / call.source_head, few.source_head = item % call.source_head;
  for (int64_t r = 0; r < few.rows; ++r) few.merge(r, partial + item * chunks * few.rows * few_stride(call), chunks);
}

size_t few_scratch(const Forward& call) {
  Arena arena{nullptr};
  Few few(call, arena);
  return arena.used + 64;
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
