// Decoding: few queries over many sources, where nearly all the time goes into reading K and V. Features lie in the
// lanes. The sources are split into chunks (split-KV) with their own partial results, which are merged in order.
// Query heads that share a source head read it together. After scores.inl and load.inl.

namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

constexpr int64_t kDecodeQueries = 4, kDecodeSources = 128;  // at most, at least
// Sources in a tile: short runs of K and V alternate, so that one is prefetched while the other is processed.
constexpr int64_t kDecodeTile = 32;
// Running sums over more sources than this are added to exact ones, as in the blocks.
constexpr int64_t kDecodeFold = kFoldTiles * kTile;

bool is_decode(const Forward& call) {
  return call.query_total <= kDecodeQueries && call.source >= kDecodeSources && call.mask.ranges <= 1 &&
         !call.dropout.least;
}

// Chunks of sources for each source head: enough work items for many threads, independent of the thread count.
int64_t decode_chunks(const Forward& call) {
  const int64_t wanted = 64 / (call.batch * call.source_head) + 1;
  return max(1, min(wanted, call.source / 256));
}

int64_t decode_rows(const Forward& call) { return call.head / call.source_head * call.query; }

// Floats of partial results of a row: the running maximum and sum, the sum by lane, and the context so far
int64_t decode_stride(const Forward& call) { return padded(call.value_dim) + 2 * N; }

int64_t decode_partial(const Forward& call) {
  return call.batch * call.source_head * decode_chunks(call) * decode_rows(call) * decode_stride(call);
}

struct Decode {
  const Forward& call;
  int64_t span;  // of the current tile, in whole vectors
  int64_t batch, source_head, key_width, value_width, rows, group;
  float *queries, *keys, *values, *weights;
  float *high, *low;  // the exact sums of each row, laid out as its partial results; used once a chunk is `folded`
  bool folded = false;
  int64_t *start, *stop;
  uint8_t* blocked;

  Decode(const Forward& call, Arena& arena) : call(call) {
    rows = decode_rows(call), group = call.head / call.source_head;
    key_width = padded(call.head_dim), value_width = padded(call.value_dim);
    queries = arena.take<float>(rows * key_width);
    keys = arena.take<float>(kDecodeTile * key_width), values = arena.take<float>(kDecodeTile * value_width);
    weights = arena.take<float>(kDecodeTile);
    const int64_t exact = call.source > kDecodeFold ? rows * decode_stride(call) : 0;
    high = arena.take<float>(exact), low = arena.take<float>(exact);
    start = arena.take<int64_t>(rows), stop = arena.take<int64_t>(rows);
    blocked = arena.take<uint8_t>(kDecodeTile);
  }

  // Rows of K or V: in place and in their own type where they are whole vectors, or a padded copy in fp32.
  struct Source {
    const char* data;
    int64_t stride;  // in elements
    Type type;
  };

  Source source_rows(const View& view, int64_t head, int64_t first, int64_t count, int64_t width, int64_t whole,
                     float* copy) {
    if (width == whole) return {at(view, call.type, batch, head, first), view.position, call.type};
    const Rows rows = whole_rows(view, head, first, count, width, whole, copy);
    return {(const char*)rows.data, rows.stride, Type::f32};
  }

  template <Type type>
  static f load(const Source& rows, int64_t row, int64_t i) {
    if (type == Type::f32) return Vec::load((const float*)rows.data + row * rows.stride + i);
    return Vec::load_as_float((const uint16_t*)rows.data + row * rows.stride + i, type);
  }

  // Rows as whole vectors of fp32: in place where possible, or a padded copy.
  Rows whole_rows(const View& view, int64_t head, int64_t first, int64_t count, int64_t width, int64_t whole,
                  float* copy) {
    if (call.type == Type::f32 && width == whole)
      return {(const float*)at(view, call.type, batch, head, first), view.position};
    for (int64_t r = 0; r < count; ++r) {
      const char* from = at(view, call.type, batch, head, first + r);
      float* to = copy + r * whole;
      if (call.type == Type::f32) std::memcpy(to, from, sizeof(float) * width);
      else to_float((const uint16_t*)from, width, call.type, to);
      for (int64_t i = width; i < whole; ++i) to[i] = 0;
    }
    return {copy, whole};
  }

  // One row of the results: a query of one of the heads that share the source head
  Queries query_of(int64_t r) const {
    return {call, batch, source_head * group + r / call.query, source_head, r % call.query, 1};
  }

  void load_queries() {
    for (int64_t r = 0; r < rows; ++r) {
      const Queries query = query_of(r);
      const Rows row =
          whole_rows(call.q, query.head, query.first, 1, call.head_dim, key_width, queries + r * key_width);
      if (row.data != queries + r * key_width)
        std::memcpy(queries + r * key_width, row.data, sizeof(float) * key_width);
      const Ranges range = ranges_of(call.mask, query, 1);
      start[r] = range.first, stop[r] = range.last;
    }
  }

  void run(int64_t first, int64_t last, float* partial) {
    load_queries();
    int64_t from = last, to = first;
    for (int64_t r = 0; r < rows; ++r) {
      float* part = partial + r * decode_stride(call);
      part[0] = -FLT_MAX;
      std::memset(part + 1, 0, sizeof(float) * (decode_stride(call) - 1));
      if (start[r] < stop[r]) from = min(from, start[r]), to = max(to, stop[r]);
    }
    from = max(from, first), to = min(to, last);
    for (int64_t fold_at = from + kDecodeFold; from < to; from += kDecodeTile) {
      if (from == fold_at) fold(partial), fold_at += kDecodeFold;
      const int64_t n = min(kDecodeTile, to - from);
      span = (n + N - 1) / N * N;
      const Source k = source_rows(call.k, source_head, from, n, call.head_dim, key_width, keys);
      const Source v = source_rows(call.v, source_head, from, n, call.value_dim, value_width, values);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t low = max(start[r], from) - from, high = min(stop[r], from + n) - from;
        if (low >= high) continue;
        float* part = partial + r * decode_stride(call);
        if (k.type == Type::f32) score_rows<Type::f32>(queries + r * key_width, k, low, high);
        else if (k.type == Type::bf16) score_rows<Type::bf16>(queries + r * key_width, k, low, high);
        else score_rows<Type::f16>(queries + r * key_width, k, low, high);
        const bool masked = finish_row(r, from, low, high);
        weigh(part, r * decode_stride(call));
        if (v.type == Type::f32) add_rows<Type::f32>(v, low, high, masked, part + 2 * N);
        else if (v.type == Type::bf16) add_rows<Type::bf16>(v, low, high, masked, part + 2 * N);
        else add_rows<Type::f16>(v, low, high, masked, part + 2 * N);
      }
    }
    if (folded) unfold(partial);
    for (int64_t r = 0; r < rows; ++r) {
      float* part = partial + r * decode_stride(call);
      part[1] = Vec::sum(Vec::load(part + N));
    }
  }

  // Calls handle(its part, its place in the exact sums) for each vector of the sums of each row.
  template <class Do>
  void each_sum(float* partial, Do handle) const {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = N; i < decode_stride(call); i += N) {
        const int64_t place = r * decode_stride(call) + i;
        handle(partial + place, place);
      }
  }

  // Adds the running sums to the exact ones, and begins new ones.
  void fold(float* partial) {
    if (!folded)
      each_sum(partial,
               [&](float*, int64_t i) { Vec::store(high + i, Vec::zero()), Vec::store(low + i, Vec::zero()); });
    folded = true;
    each_sum(partial, [&](float* part, int64_t i) {
      add_exactly(high + i, low + i, Vec::load(part));
      Vec::store(part, Vec::zero());
    });
  }

  void unfold(float* partial) {
    fold(partial);
    each_sum(partial,
             [&](float* part, int64_t i) { Vec::store(part, Vec::add(Vec::load(high + i), Vec::load(low + i))); });
  }

  // Scores become weights, not yet normalized. The row's exact sums are at `place`.
  void weigh(float* part, int64_t place) {
    f most = Vec::set1(part[0]);
    for (int64_t s = 0; s < span; s += N) most = Vec::max(Vec::load(weights + s), most);
    if (Vec::greater(most, Vec::set1(part[0]))) shrink(part, place, most);
    f sum = Vec::load(part + N);
    for (int64_t s = 0; s < span; s += N) {
      const f weight = exp_of(Vec::sub(Vec::load(weights + s), Vec::set1(part[0])));
      sum = Vec::add(sum, weight);
      Vec::store(weights + s, weight);
    }
    Vec::store(part + N, sum);
  }

  // Rescales the sums to a new maximum; rare after the first sources.
  void shrink(float* part, int64_t place, f most) {
    float top[N];
    Vec::store(top, most);
    float now = part[0];
    for (int i = 0; i < N; ++i) now = top[i] > now ? top[i] : now;
    const f factor = exp_of(Vec::set1(part[0] - now));
    for (int64_t i = N; i < decode_stride(call); i += N) {
      Vec::store(part + i, Vec::mul(Vec::load(part + i), factor));
      if (!folded) continue;
      Vec::store(high + place + i, Vec::mul(Vec::load(high + place + i), factor));
      Vec::store(low + place + i, Vec::mul(Vec::load(low + place + i), factor));
    }
    part[0] = now;
  }

  template <Type type>
  void add_rows(const Source& v, int64_t low, int64_t high, bool masked, float* out) {
    int64_t i = 0;
    for (; i + 8 * N <= value_width; i += 8 * N) add_values<type, 8>(v, low, high, masked, i, out + i);
    for (; i + 4 * N <= value_width; i += 4 * N) add_values<type, 4>(v, low, high, masked, i, out + i);
    for (; i < value_width; i += N) add_values<type, 1>(v, low, high, masked, i, out + i);
  }

  // The common widths are compile-time constants.
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

  // A row of K times the query, which is in V vectors or, with V = 0, only in memory.
  template <Type type, int V>
  f products(const float* q, const f* query, const Source& k, int64_t row) {
    f sum = Vec::mul(load<type>(k, row, 0), V ? query[0] : Vec::load(q));
    CLEARHEAD_UNROLL_FOR (int i = 1; i < V; ++i) sum = Vec::fma(load<type>(k, row, i * N), query[i], sum);
    for (int64_t i = N; !V && i < key_width; i += N) sum = Vec::fma(load<type>(k, row, i), Vec::load(q + i), sum);
    return sum;
  }

  // Applies softcap, bias and blocked edges; returns whether any edge inside the range is blocked.
  bool finish_row(int64_t r, int64_t from, int64_t low, int64_t high) {
    const int64_t head = query_of(r).head, query = query_of(r).first;
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

  // Merges the partial results of one row, in the order of the chunks.
  void merge(int64_t r, const float* partial, int64_t chunks) {
    const Queries query = query_of(r);
    const int64_t head = query.head, stride = decode_stride(call);
    float most = call.sinks && call.sinks[head] > -FLT_MAX ? call.sinks[head] : -FLT_MAX;
    for (int64_t c = 0; c < chunks; ++c) {
      const float part = partial[(c * rows + r) * stride];
      most = part > most ? part : most;
    }
    float total = call.sinks ? std::exp(call.sinks[head] - most) : 0;
    float best = -INFINITY;  // without the sink
    for (int64_t i = 0; i < call.value_dim; ++i) values[i] = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      const float* part = partial + (c * rows + r) * stride;
      if (part[1] == 0) continue;
      best = part[0] > best ? part[0] : best;
      const float factor = std::exp(part[0] - most);
      total += factor * part[1];
      for (int64_t i = 0; i < call.value_dim; ++i) values[i] += factor * part[2 * N + i];
    }
    char* to = (char*)at(call.out, call.type, batch, head, query.first);
    const Ranges range = ranges_of(call.mask, query, 1);
    bool out_of_range =
        is_row_out_of_range(call, most, total, !call.mask.bytes && !call.bias.data && range.first < range.last);
    for (int64_t i = 0; i < call.value_dim; ++i) {
      const float value = total == 0 ? 0 : values[i] / total;
      out_of_range |= !(std::fabs(value) <= FLT_MAX);
      if (call.type == Type::f32) ((float*)to)[i] = value;
      else ((uint16_t*)to)[i] = to_half(value, call.type);
    }
    if (call.out_of_range && out_of_range) call.out_of_range->store(true, std::memory_order_relaxed);
    const int64_t place = query.row(0);
    if (call.lse) call.lse[place] = total == 0 ? -INFINITY : most + std::log(total);
    if (call.max_score) call.max_score[place] = best;
    if (call.row_max) call.row_max[place] = total == 0 ? 0 : most, call.row_scale[place] = total == 0 ? 0 : 1 / total;
  }
};

// Work item: one chunk of the sources of one source head.
void decode_item(const Forward& call, int64_t item, float* partial, char* scratch) {
  Arena arena{scratch};
  Decode decode(call, arena);
  const int64_t chunks = decode_chunks(call), chunk = item % chunks, row = item / chunks;
  decode.batch = row / call.source_head, decode.source_head = row % call.source_head;
  const int64_t size = ((call.source + chunks - 1) / chunks + kTile - 1) / kTile * kTile;
  decode.run(min(chunk * size, call.source), min((chunk + 1) * size, call.source),
             partial + item * decode.rows * decode_stride(call));
}

void decode_merge(const Forward& call, int64_t item, const float* partial, char* scratch) {
  Arena arena{scratch};
  Decode decode(call, arena);
  const int64_t chunks = decode_chunks(call);
  decode.batch = item / call.source_head, decode.source_head = item % call.source_head;
  for (int64_t r = 0; r < decode.rows; ++r)
    decode.merge(r, partial + item * chunks * decode.rows * decode_stride(call), chunks);
}

size_t decode_scratch(const Forward& call) {
  Arena arena{nullptr};
  Decode decode(call, arena);
  return arena.used + 64;
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
