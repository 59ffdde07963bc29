#include "host/dispatch.h"

#if defined(CLEARHEAD_ARM) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "host/threads.h"

namespace clearhead {

extern const Kernel baseline_kernel;
#ifdef CLEARHEAD_X86
extern const Kernel avx2_kernel, avx512_kernel, avx512_bf16_kernel;
#elif defined(CLEARHEAD_ARM)
extern const Kernel neon_kernel, neon_bf16_kernel;
#endif

namespace {

#ifdef CLEARHEAD_ARM
bool has_bf16() {
#ifdef __linux__
  return getauxval(AT_HWCAP2) & 1ul << 14;  // HWCAP2_BF16, which older headers lack
#else
  return false;
#endif
}
#endif

std::vector<const Kernel*> supported() {
  std::vector<const Kernel*> result;
#ifdef CLEARHEAD_X86
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) result.push_back(&avx512_bf16_kernel);
  if (avx512) result.push_back(&avx512_kernel);
  if (avx2) result.push_back(&avx2_kernel);
#elif defined(CLEARHEAD_ARM)
  if (has_bf16()) result.push_back(&neon_bf16_kernel);
  result.push_back(&neon_kernel);
#endif
  result.push_back(&baseline_kernel);
  return result;
}

const std::vector<const Kernel*>& kernels() {
  static const std::vector<const Kernel*> all = supported();
  return all;
}

const Kernel* find(const std::string& name) {
  for (const Kernel* kernel : kernels())
    if (name == kernel->name) return kernel;
  return nullptr;
}

std::atomic<const Kernel*> chosen{nullptr};

}  // namespace

std::vector<std::string> available() {
  std::vector<std::string> names;
  for (const Kernel* kernel : kernels()) names.push_back(kernel->name);
  return names;
}

bool choose(const std::string& name) {
  const Kernel* kernel = name.empty() ? nullptr : find(name);
  if (!name.empty() && !kernel) return false;
  chosen = kernel;
  return true;
}

const Kernel* current(std::string& error) {
  if (const Kernel* kernel = chosen.load(std::memory_order_acquire)) return kernel;
  const char* forced = std::getenv("CLEARHEAD_ISA");
  const Kernel* kernel = forced && *forced ? find(forced) : kernels().front();
  if (!kernel) {
    error = "CLEARHEAD_ISA: this machine has no " + std::string(forced) + " kernel; it has";
    for (const std::string& name : available()) error += " " + name;
    return nullptr;
  }
  chosen.store(kernel, std::memory_order_release);
  return kernel;
}

namespace {

// The decode kernel: only the context, log-sum-exp, largest scores and row statistics.
bool forward_decode(const Kernel& kernel, const Forward& call, int threads) {
  std::unique_ptr<float[]> partial(new (std::nothrow) float[(size_t)kernel.decode_partial(call)]);
  if (!partial) return false;
  const int64_t heads = call.batch * call.source_head;
  const size_t bytes = kernel.decode_scratch(call);
  return spread_near(heads * kernel.decode_chunks(call), threads, bytes,
                     [&](int64_t i, char* memory) { kernel.decode(call, i, partial.get(), memory); }) &&
         spread(heads, 1, bytes, [&](int64_t i, char* memory) { kernel.decode_merge(call, i, partial.get(), memory); });
}

bool reads_more(const Forward& call) {
  return call.entropy || call.top || call.distance || call.mass || call.rows || call.received || call.cell_sum;
}

// K or V with neighbouring sources in pairs; null if memory ran out.
std::unique_ptr<uint32_t[]> pack(const Kernel& kernel, const Forward& call, const View& view, int64_t width,
                                 int threads) {
  const int64_t heads = call.batch * call.source_head;
  const int64_t size = heads * ((call.source + 1) / 2) * width;
  std::unique_ptr<uint32_t[]> packed(new (std::nothrow) uint32_t[(size_t)size + 1]);
  auto item = [&](int64_t i, char*) { kernel.pack_sources(call, view, width, i, packed.get()); };
  if (packed && !spread(heads, threads, 64, item)) packed.reset();
  return packed;
}

bool forward_blocks(const Kernel& kernel, Forward& call, int threads) {
  std::unique_ptr<uint32_t[]> packed;
  if (call.out.data && kernel.dots_bf16 && call.type == Type::bf16 && call.head_dim % 2 == 0) {
    packed = pack(kernel, call, call.v, call.value_dim, threads);
    if (!packed) return false;
    call.packed_v = packed.get();
  }
  const int64_t blocks = (call.query + kernel.block - 1) / kernel.block;
  const bool sums = call.received || call.cell_sum;
  if (!sums || call.slots > blocks) call.slots = blocks;
  call.threads = threads;
  return spread(call.batch * call.head * call.slots, threads, kernel.forward_scratch(call),
                [&](int64_t i, char* memory) { kernel.forward(call, i, memory); });
}

}  // namespace

bool forward(const Kernel& kernel, Forward& call, int threads) {
  const double work = (double)call.batch * call.head * call.query * call.source * (call.head_dim + call.value_dim);
  if (!kernel.is_decode(call) || !call.out.data) return forward_blocks(kernel, call, threads_for(work, threads));
  // The time goes into reading the sources, not into the few operations on them.
  if (!forward_decode(kernel, call, threads_for(4 * work / call.query, threads))) return false;
  if (!reads_more(call)) return true;
  // Other readings come from the blocks, which leave the context as it is.
  call.out.data = nullptr, call.lse = call.row_max = call.max_score = nullptr, call.out_of_range = nullptr;
  return forward_blocks(kernel, call, threads_for(work, threads));
}

namespace {

// How many work items share the sources of a head: enough for all threads, and equally many for each thread.
int64_t slots_for(const Forward& call, int64_t items, int threads) {
  const int64_t tiles = (call.source + 63) / 64, enough = (2 * threads + items - 1) / items;
  int64_t slots = enough;
  while (items * slots % threads && slots < enough + threads) ++slots;
  return slots < tiles ? slots : tiles;
}

// Assigns samples and heads that share a gradient of a bias to one work item; returns the number of such groups.
int64_t share_bias(Backward& work) {
  const Forward& call = work.forward;
  const bool wanted = work.dbias.data;
  work.shared_batch = wanted && !work.dbias.batch ? call.batch : 1;
  work.shared_heads = wanted && !work.dbias.head ? call.source_head : 1;
  return call.batch / work.shared_batch * (call.source_head / work.shared_heads);
}

using Floats = std::unique_ptr<float[]>;
Floats floats(int64_t count) { return Floats(new (std::nothrow) float[(size_t)count + 1]); }

// The sums of each slot for the gradient of a bias that broadcasts over the sources.
struct SlotSums {
  BiasGrad to;
  int64_t count = 0;
  Floats each;

  bool begin(Backward& work) {
    to = work.dbias;
    const Forward& call = work.forward;
    if (!to.data || to.source || work.slots == 1) return true;
    count = 1 + (to.batch ? (call.batch - 1) * to.batch : 0) + (to.head ? (call.head - 1) * to.head : 0) +
            (to.query ? (call.query - 1) * to.query : 0);
    each = floats(count * work.slots);
    if (!each) return false;
    for (int64_t i = 0; i < count * work.slots; ++i) each[(size_t)i] = 0;
    work.dbias.data = each.get(), work.dbias.slot = count;
    return true;
  }
  void end(const Backward& work) const {
    for (int64_t slot = 0; each && slot < work.slots; ++slot)
      for (int64_t i = 0; i < count; ++i) to.data[i] += each[(size_t)(slot * count + i)];
  }
};

}  // namespace

bool backward(const Kernel& kernel, Backward& work, int threads) {
  const Forward& call = work.forward;
  const int64_t items = share_bias(work), rows = call.batch * call.head;
  work.slots = slots_for(call, items, all_threads(threads));
  threads = threads_for(2.5 * rows * call.query * call.source * (call.head_dim + call.value_dim), threads);
  std::unique_ptr<uint32_t[]> packed;
  if (kernel.dots_bf16 && call.type == Type::bf16 && call.head_dim % 2 == 0 && call.value_dim % 2 == 0) {
    packed = pack(kernel, call, call.k, call.head_dim, threads);
    if (!packed) return false;
    work.packed_k = packed.get();
  }
  Floats slots;
  if (work.slots > 1) {
    slots = floats(work.slots * rows * call.query * call.head_dim);
    if (!slots) return false;
    work.dq_slots = slots.get();
  }
  SlotSums bias;
  if (!bias.begin(work)) return false;
  const size_t bytes = kernel.backward_scratch(work);
  auto run = [&](int64_t count, auto item) {
    return spread(count, threads, bytes, [&](int64_t i, char* memory) { item(work, i, memory); });
  };
  const int64_t blocks = (call.query + kernel.backward_block - 1) / kernel.backward_block;
  if (work.row_terms && (work.readings.received || work.readings.rows || work.readings.cells) &&
      !run(rows * blocks, kernel.backward_rows))
    return false;
  if (!run(items * work.slots, kernel.backward)) return false;
  bias.end(work);
  return work.slots == 1 || run(rows, kernel.backward_sum);
}

double peak(const Kernel& kernel, int64_t rounds, int64_t each, bool pairs, int threads) {
  threads = threads_for(1e12, threads);
  std::vector<double> done((size_t)threads);
  spread(threads, threads, 64, [&](int64_t i, char*) { done[(size_t)i] = kernel.peak(rounds, each, pairs); });
  double total = 0;
  for (double operations : done) total += operations;
  return total;
}

}  // namespace clearhead
