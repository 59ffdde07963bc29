// What a kernel is given: plain pointers, sizes and strides. Nothing here knows torch or Python.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace clearhead {

// Raised with every change of what the Python side may ask of the module or has to make of its answers,
// together with CONTRACT in attention/impl/native/kernel.py: a module that was built from other sources is not used.
constexpr int kContract = 2;

enum class Type : int32_t { f32 = 0, f16 = 1, bf16 = 2 };

// A (batch, head, position, feature) tensor; strides in elements, the features lie side by side.
struct View {
  char* data;
  int64_t batch, head, position;
};

// Allowed ranges of sources a query, [start, stop), as arrays of (range, batch, head, query); a
// stride of 0 broadcasts, and a source is allowed that lies in any of a query's ranges. Edges are
// bytes, one for each (query, source), 0 for blocked.
constexpr int64_t kMaxRanges = 4;

struct Edges {
  const int32_t* start;
  const int32_t* stop;
  int64_t ranges, range_step, range_batch, range_head;
  const uint8_t* bytes;
  int64_t batch, head, query, source;
};

struct Bias {
  const float* data;
  int64_t batch, head, query, source;
};

// A weight is kept where the upper 53 bits of its hash are at least `least`; 0 for no dropout.
struct Dropout {
  uint64_t seed, least;
  float scale;  // of the weights that are kept
};

// One forward call. Results that are null are not computed. Results per query are contiguous
// (batch, head, query_total) arrays, of which this call fills `query` entries from `first_query`.
struct Forward {
  int64_t batch, head, source_head, query, source, head_dim, value_dim;
  int64_t first_query, query_total;
  Type type;
  View q, k, v, out;     // out.data may be null: only the results below are wanted
  float scale, softcap;  // softcap 0: none
  const float* sinks;    // (head,) or null
  Edges mask;
  Bias bias;
  Dropout dropout;  // between the weights that are read and the context

  float* lse;
  float* row_max;    // what the backward needs to have the same weights: the largest score of each
  float* row_scale;  // query, and one over the sum of exp(score - row_max), 0 for an empty row
  float* entropy;
  int64_t top;
  float* top_weights;  // (batch, head, query_total, top)
  int64_t* top_sources;
  float* distance;
  int64_t distance_offset;  // position of query 0 among the sources
  Edges mass_edges;
  float* mass;
  const int32_t* row_of;  // (query_total,): the row of `rows` that a query fills, or -1
  int64_t row_count;
  float* rows;  // (batch, head, row_count, source)

  // Sums over queries go to a slot of their own, so that no result hangs on the threads' pace.
  int64_t slots;
  float* received;  // (slots, batch, head, source)
  int64_t query_cells, source_cells;
  const int32_t* query_edges;   // (query_cells + 1,), ascending positions
  const int32_t* source_edges;  // (source_cells + 1,)
  float* cell_sum;              // (slots, batch, head, query_cells, source_cells)
  float* cell_max;

  const uint32_t* packed_v;  // (batch, source_head, pairs of sources, value_dim), made by pack_sources

  int64_t threads;  // that share the work items, in turn

  // Set where scores or sums left the range in which fp32 is exact enough, and the result may be wrong.
  std::atomic<bool>* odd;
};

// The gradient of the mass of some edges, (batch, head, query_total).
struct MassChange {
  Edges edges;
  const float* change;
};

// Gradients of readings, or null. Those per query are (batch, head, query_total).
struct Readings {
  const float* entropy;
  const float* distance;  // of positions counted as in `Forward`
  const MassChange* masses;
  int64_t mass_count;
  const float* scores;    // (batch, head, query_total, source), of the final scores
  const float* received;  // (batch, head, source)
  const float* rows;      // (batch, head, row_count, source), of the queries in `row_of`
  const float* cells;     // (batch, head, query_cells, source_cells), of the sums of weights
  int64_t top_count;
  const float* top;  // (batch, head, query_total, top_count)
  const int64_t* top_sources;
};

// Where the gradient of a bias is added up: strides in elements, 0 where the bias broadcasts. Where it
// broadcasts over the sources each slot has a sum of its own.
struct Sums {
  float* data;
  int64_t slot, batch, head, query, source;
};

// Gradients of one call. What is not wanted is null, but for dq, dk and dv.
struct Backward {
  Forward forward;  // sizes, q, k, v, out, mask, bias, scale, softcap, row_max and row_scale of the call
  View grad_out;    // in the type of q
  Readings readings;
  // Per (batch, head, query_total), or null: sum_j weight_j * gradient of weight_j, of the readings. The
  // kernel adds what `received`, `rows` and `cells` are worth.
  float* row_terms;
  Type type;  // of dq, dk and dv
  View dq, dk, dv;
  Sums dbias;

  // Set by dispatch.cpp: the tiles of sources are dealt out over so many work items a source head, each
  // with a dq of its own, (slots, batch, head, query, head_dim), where they are several. One item does
  // all samples and source heads that share a wanted gradient of a bias.
  int64_t slots, shared_batch, shared_heads;
  float* dq_slots;
  const uint32_t* packed_k;  // as packed_v, where bf16 dot products are used
};

// One instruction set's kernels.
struct Kernel {
  const char* name;
  bool dots_bf16;
  int64_t block;  // queries a block of the forward
  int64_t backward_block;
  size_t (*forward_scratch)(const Forward&);
  void (*forward)(const Forward&, int64_t item, char* scratch);
  void (*pack_sources)(const Forward&, const View&, int64_t width, int64_t item, uint32_t* packed);
  bool (*is_few)(const Forward&);
  int64_t (*few_chunks)(const Forward&);
  int64_t (*few_partial)(const Forward&);  // floats of partial results
  size_t (*few_scratch)(const Forward&);
  void (*few)(const Forward&, int64_t item, float* partial, char* scratch);
  void (*few_merge)(const Forward&, int64_t item, const float* partial, char* scratch);
  size_t (*backward_scratch)(const Backward&);
  void (*backward)(const Backward&, int64_t item, char* scratch);
  void (*backward_rows)(const Backward&, int64_t item, char* scratch);
  void (*backward_sum)(const Backward&, int64_t item, char* scratch);
  double (*peak)(int64_t rounds, int64_t each, bool pairs);
  void (*exp2)(const float* from, float* to, int64_t count);
};

}  // namespace clearhead
