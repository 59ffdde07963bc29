#include "host/dispatch.h"

#ifdef CLEARHEAD_STD_THREADS  // for the thread sanitizer, which does not know OpenMP
#include <thread>
#else
#include <omp.h>
#endif

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define CLEARHEAD_MAPS
#endif

#if defined(CLEARHEAD_ARM) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

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

// Memory that a thread keeps from call to call, so that big strips are not faulted in every time.
// It is mapped where that can be: a block that stays would pin the heap at the size it has by then.
struct Scratch {
  char* memory = nullptr;
  size_t size = 0;
  ~Scratch() { release(); }
  char* at_least(size_t bytes) {
    if (bytes <= size) return memory;
    release();
    size = (bytes + 4095) & ~(size_t)4095;
#ifdef CLEARHEAD_MAPS
    void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory = mapped == MAP_FAILED ? nullptr : (char*)mapped;
#else
    memory = (char*)std::aligned_alloc(4096, size);
#endif
    if (!memory) size = 0;
    return memory;
  }
  void release() {
#ifdef CLEARHEAD_MAPS
    if (memory) munmap(memory, size);
#else
    std::free(memory);
#endif
  }
};
thread_local Scratch scratch;

// Runs work(number of the thread, scratch) on every thread of a team; false where memory ran out.
template <class Work>
bool with_team(int threads, size_t bytes, Work work) {
  std::atomic<bool> ok{true};
  auto member = [&](int me) {
    if (char* memory = scratch.at_least(bytes)) work(me, memory);
    else ok = false;
  };
  if (threads <= 1) {
    member(0);
    return ok;
  }
#ifdef CLEARHEAD_STD_THREADS
  std::vector<std::thread> team;
  for (int t = 0; t < threads; ++t) team.emplace_back(member, t);
  for (std::thread& thread : team) thread.join();
#else
#pragma omp parallel num_threads(threads)
  member(omp_get_thread_num());
#endif
  return ok;
}

// Runs item(i, scratch) for all i, on as many threads as pay; false where memory ran out.
template <class Item>
bool spread(int64_t items, int threads, size_t bytes, Item item) {
  std::atomic<int64_t> next{0};
  if (threads > items) threads = (int)items;
  return with_team(threads, bytes, [&](int, char* memory) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) item(i, memory);
  });
}

// The same with neighbouring items on one thread, in every call on the same one, which finds in its
// caches and its table of pages what it left there. Who is done early helps the others.
template <class Item>
bool spread_near(int64_t items, int threads, size_t bytes, Item item) {
  if (threads > items) threads = (int)items;
  if (threads <= 1) return spread(items, threads, bytes, item);
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  std::unique_ptr<Share[]> shares(new (std::nothrow) Share[(size_t)threads]);
  if (!shares) return false;
  for (int t = 0; t < threads; ++t) shares[t].next = items * t / threads, shares[t].end = items * (t + 1) / threads;
  return with_team(threads, bytes, [&](int me, char* memory) {
    for (int t = 0; t < threads; ++t) {
      Share& share = shares[(me + t) % threads];
      for (int64_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) item(i, memory);
    }
  });
}

// Waking a second thread costs a few microseconds: not for less work than this.
constexpr double kWorthAThread = 4e5;

int threads_for(double multiply_adds, int threads) {
#ifdef CLEARHEAD_STD_THREADS
  if (threads <= 0) threads = 4;
#else
  if (threads <= 0) threads = omp_get_max_threads();
#endif
  const double worth = multiply_adds / kWorthAThread;
  return worth < threads ? (worth < 1 ? 1 : (int)worth) : threads;
}

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

// Few queries: the context from chunks of sources, then what is read, if anything, by the others' way.
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

// K or V with neighbouring sources side by side; null where memory ran out.
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
  if (kernel.dots_bf16 && call.type == Type::bf16 && call.head_dim % 2 == 0) {
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
  if (!kernel.is_decode(call)) return forward_blocks(kernel, call, threads_for(work, threads));
  // reading the sources costs more than the few operations on them
  if (!forward_decode(kernel, call, threads_for(4 * work / call.query, threads))) return false;
  if (!reads_more(call)) return true;
  call.out.data = nullptr, call.lse = call.row_max = nullptr, call.out_of_range = nullptr;
  return forward_blocks(kernel, call, threads_for(work, threads));
}

namespace {

int all_threads(int threads) {
#ifdef CLEARHEAD_STD_THREADS
  return threads > 0 ? threads : 4;
#else
  return threads > 0 ? threads : omp_get_max_threads();
#endif
}

// How many work items share the sources of a head: enough for all threads, and as many for each.
int64_t slots_for(const Forward& call, int64_t items, int threads) {
  const int64_t tiles = (call.source + 63) / 64, enough = (2 * threads + items - 1) / items;
  int64_t slots = enough;
  while (items * slots % threads && slots < enough + threads) ++slots;
  return slots < tiles ? slots : tiles;
}

// Samples and heads that share a bias whose gradient is wanted go to one work item.
int64_t share_bias(Backward& work) {
  const Forward& call = work.forward;
  const bool wanted = work.dbias.data;
  work.shared_batch = wanted && !work.dbias.batch ? call.batch : 1;
  work.shared_heads = wanted && !work.dbias.head ? call.source_head : 1;
  return call.batch / work.shared_batch * (call.source_head / work.shared_heads);
}

using Floats = std::unique_ptr<float[]>;
Floats floats(int64_t count) { return Floats(new (std::nothrow) float[(size_t)count + 1]); }

// A bias that broadcasts over the sources has a sum of each slot.
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
