// The work items of the backward. After block.inl.
namespace clearhead {
namespace CLEARHEAD_ISA {
namespace {

// The size of the next block: two even blocks rather than a whole and a narrow one.
inline int64_t block_size(int64_t left) { return left > 3 * N && left <= 4 * N ? 2 * N : min(left, 3 * N); }

template <int W, class Do>
void with_block(SourceGrads& sources, Arena arena, const Queries& queries, Do handle) {
  GradientBlock<W> block(sources, queries, arena);
  handle(block);
}

template <class Do>
void each_block(SourceGrads& sources, const Arena& arena, int64_t head, int64_t first, int64_t last, Do handle) {
  for (int64_t count; first < last; first += count) {
    count = block_size(last - first);
    const Queries queries{sources.call, sources.batch, head, sources.source_head, first, count};
    if (count > 2 * N) with_block<3>(sources, arena, queries, handle);
    else if (count > N) with_block<2>(sources, arena, queries, handle);
    else with_block<1>(sources, arena, queries, handle);
  }
}

// Work item: every `slots`-th tile of sources of one source head, or of all heads and samples that share a gradient of
// a bias, with all queries that read them.
void backward_item(const Backward& work, int64_t item, char* scratch) {
  const Forward& call = work.forward;
  Arena arena{scratch};
  SourceGrads sources(work, item % work.slots, arena);
  const int64_t row = item / work.slots, group = call.head / call.source_head;
  const int64_t heads = call.source_head / work.shared_heads;
  const int64_t batch = row / heads * work.shared_batch, head = row % heads * work.shared_heads;
  for (sources.batch = batch; sources.batch < batch + work.shared_batch; ++sources.batch)
    for (sources.source_head = head; sources.source_head < head + work.shared_heads; ++sources.source_head) {
      sources.start();
      for (int64_t h = 0; h < group; ++h)
        each_block(sources, arena, sources.source_head * group + h, 0, call.query, [](auto& block) { block.run(); });
      sources.finish();
    }
}

// Work item: the row terms of one block of queries of one head.
void backward_rows(const Backward& work, int64_t item, char* scratch) {
  const Forward& call = work.forward;
  Arena arena{scratch};
  SourceGrads sources(work, 0, arena);
  const int64_t blocks = (call.query + kMaxLanes - 1) / kMaxLanes;
  const int64_t row = item / blocks, first = item % blocks * kMaxLanes;
  const int64_t head = row % call.head;
  sources.batch = row / call.head, sources.source_head = head / (call.head / call.source_head);
  each_block(sources, arena, head, first, min(first + kMaxLanes, call.query),
             [](auto& block) { block.add_row_terms(); });
}

// Work item: dQ of one head, summed over its slots.
void backward_sum(const Backward& work, int64_t item, char* scratch) {
  const Forward& call = work.forward;
  auto* sum = (float*)scratch;
  for (int64_t i = 0; i < call.query; ++i) {
    const int64_t step = call.batch * call.head * call.query * call.head_dim;
    const float* from = work.dq_slots + (item * call.query + i) * call.head_dim;
    std::memcpy(sum, from, sizeof(float) * call.head_dim);
    for (int64_t slot = 1; slot < work.slots; ++slot)
      for (int64_t j = 0; j < call.head_dim; ++j) sum[j] += from[slot * step + j];
    write_row(work.dq, work.type, item / call.head, item % call.head, i, sum, call.head_dim);
  }
}

size_t backward_scratch(const Backward& work) {
  Arena arena{nullptr};
  SourceGrads sources(work, 0, arena);
  GradientBlock<Vec::vectors> block(sources, queries_of(work.forward, 0, 0, 0, 0), arena);
  return arena.used + 64;
}

}  // namespace
}  // namespace CLEARHEAD_ISA
}  // namespace clearhead
