// What a kernel receives: pointers, sizes and strides. Nothing here depends on torch or Python.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace clearhead {

// The version of the interface between this module and its Python callers. It is raised, together with CONTRACT
// in attention/impl/native/kernel.py, whenever a binding or the meaning of a result changes, so that a stale build is
// not used.
constexpr int kContract = 4;

enum class Type : int32_t { f32 = 0, f16 = 1, bf16 = 2 };

// A (batch, head, position, feature) tensor; strides in elements, the features are contiguous.
struct View {
  char* data;
  int64_t batch, head, position;
};

constexpr int64_t kMaxRanges = 4;

// The sources that each query may read: those in any of its ranges [start, stop), which are arrays of (range, batch,
// head, query), and of these the ones whose byte, one for each (query, source), is not 0. Null start or bytes allow
// everything; a stride of 0 broadcasts.
struct Edges {
  const int32_t* start;
  const int32_t* stop;
  int64_t ranges, range_stride, range_batch, range_head;
  const uint8_t* bytes;
  int64_t batch, head, query, source;
};

struct Bias {
  const float* data;
  int64_t batch, head, query, source;
};

// A weight is kept where the upper 53 bits of its hash are at least `least`; `least` is 0 without dropout.
struct Dropout {
  uint64_t seed, least;
  float scale;  // the factor of the weights that are kept
};

// One forward call. Results that are null are not computed. Results per query are contiguous
// (batch, head, query_total) arrays, of which this call fills `query` entries from `first_query` on.
struct Forward {
  int64_t batch, head, source_head, query, source, head_dim, value_dim;
  int64_t first_query, query_total;
  Type type;
  View q, k, v, out;     // out.data may be null: only the results below are computed
  float scale, softcap;  // a softcap of 0 means none
  const float* sinks;    // (head,) or null
  Edges mask;
  Bias bias;
  Dropout dropout;  // acts between the weights that are read and the context

  float* lse;
  float* row_max;    // what the backward recomputes the weights from: the largest score of each query,
  float* row_scale;  // and one over the sum of exp(score - row_max), 0 for an empty row
  float* entropy;
  float* max_score;  // the largest score of each query, without the sink logit; -inf for an empty row
  int64_t top;
  float* top_weights;  // (batch, head, query_total, top)
  int64_t* top_sources;
  float* distance;
  int64_t distance_offset;  // position of query 0 among the sources
  Edges mass_edges;
  float* mass;
  const int32_t* row_of;  // (query_total,): the row of `rows` that each query fills, or -1
  int64_t row_count;
  float* rows;  // (batch, head, row_count, source)

  // Each slot has its own sums over queries, so that no result depends on the order in which threads finish.
  int64_t slots;
  float* received;  // (slots, batch, head, source)
  int64_t query_cells, source_cells;
  const int32_t* query_edges;   // (query_cells + 1,), ascending positions
  const int32_t* source_edges;  // (source_cells + 1,)
  float* cell_sum;              // (slots, batch, head, query_cells, source_cells)
  float* cell_max;

  const uint32_t* packed_v;  // (batch, source_head, pair of sources, value_dim), made by pack_sources

  int64_t threads;  // that take the work items, in turn

  // Set where scores or sums leave the range in which fp32 is exact enough: the result may be wrong.
  std::atomic<bool>* out_of_range;
};

// The gradient of the mass of some edges, (batch, head, query_total).
struct MassGrad {
  Edges edges;
  const float* grad;
};

// Gradients of readings, or null. Those per query are (batch, head, query_total).
struct ReadingGrads {
  const float* entropy;
  const float* distance;  // with distance_offset as in `Forward`
  const MassGrad* masses;
  int64_t mass_count;
  const float* scores;    // (batch, head, query_total, source), of the scores after softcap and bias
  const float* received;  // (batch, head, source)
  const float* rows;      // (batch, head, row_count, source), of the queries in `row_of`
  const float* cells;     // (batch, head, query_cells, source_cells), of the sum of the cell's weights
  int64_t top_count;
  const float* top;  // (batch, head, query_total, top_count)
  const int64_t* top_sources;
};

// Where the gradient of a bias is accumulated: strides in elements, 0 where the bias broadcasts. Where it
// broadcasts over the sources each slot has its own sum.
struct BiasGrad {
  float* data;
  int64_t slot, batch, head, query, source;
};

// One backward call. dq, dk and dv are always computed, the rest where it is not null.
struct Backward {
  Forward forward;  // sizes, q, k, v, out, mask, bias, scale, softcap, row_max and row_scale of the call
  View grad_out;    // in the type of q
  ReadingGrads readings;
  // (batch, head, query_total), or null: sum_j weight_j * gradient of weight_j, over the readings. The kernel adds
  // the terms of `received`, `rows` and `cells`.
  float* row_terms;
  Type type;  // of dq, dk and dv
  View dq, dk, dv;
  BiasGrad dbias;

  // Set by dispatch.cpp: the tiles of sources are spread over `slots` work items for each source head. With more than
  // one, each item has its own dq in dq_slots, (slots, batch, head, query, head_dim). One item handles all samples
  // and source heads that share a gradient of a bias.
  int64_t slots, shared_batch, shared_heads;
  float* dq_slots;
  const uint32_t* packed_k;  // like packed_v; null where no bf16 dot products are used
};

// One instruction set's kernels.
struct Kernel {
  const char* name;
  bool dots_bf16;
  int64_t block;           // queries in a block of the forward
  int64_t backward_block;  // and of the backward
  size_t (*forward_scratch)(const Forward&);
  void (*forward)(const Forward&, int64_t item, char* scratch);
  void (*pack_sources)(const Forward&, const View&, int64_t width, int64_t item, uint32_t* packed);
  bool (*is_decode)(const Forward&);
  int64_t (*decode_chunks)(const Forward&);
  int64_t (*decode_partial)(const Forward&);  // the number of floats of partial results
  size_t (*decode_scratch)(const Forward&);
  void (*decode)(const Forward&, int64_t item, float* partial, char* scratch);
  void (*decode_merge)(const Forward&, int64_t item, const float* partial, char* scratch);
  size_t (*backward_scratch)(const Backward&);
  void (*backward)(const Backward&, int64_t item, char* scratch);
  void (*backward_rows)(const Backward&, int64_t item, char* scratch);
  void (*backward_sum)(const Backward&, int64_t item, char* scratch);
  double (*peak)(int64_t rounds, int64_t each, bool pairs);
  void (*exp2)(const float* from, float* to, int64_t count);
};

}  // namespace clearhead
