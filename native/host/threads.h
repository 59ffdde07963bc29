// Threads and their scratch memory, and how work items are spread over them.
#pragma once

#ifdef CLEARHEAD_STD_THREADS  // for the thread sanitizer, which does not support OpenMP
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define CLEARHEAD_MMAP
#endif

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace clearhead {

// Memory that a thread keeps from call to call, so that the pages of a long strip are not faulted in each time. It is
// mapped where possible: a block on the heap that is never freed would keep the heap from shrinking.
struct Scratch {
  char* memory = nullptr;
  size_t size = 0;
  ~Scratch() { release(); }
  char* at_least(size_t bytes) {
    if (bytes <= size) return memory;
    release();
    size = (bytes + 4095) & ~(size_t)4095;
#ifdef CLEARHEAD_MMAP
    void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory = mapped == MAP_FAILED ? nullptr : (char*)mapped;
#else
    memory = (char*)std::aligned_alloc(4096, size);
#endif
    if (!memory) size = 0;
    return memory;
  }
  void release() {
#ifdef CLEARHEAD_MMAP
    if (memory) munmap(memory, size);
#else
    std::free(memory);
#endif
  }
};
inline thread_local Scratch scratch;

// Runs work(number of the thread, scratch) on every thread of a team. Returns false if memory ran out.
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

// Runs item(i, scratch) for all i on up to so many threads. Returns false if memory ran out.
template <class Item>
bool spread(int64_t items, int threads, size_t bytes, Item item) {
  std::atomic<int64_t> next{0};
  if (threads > items) threads = (int)items;
  return with_team(threads, bytes, [&](int, char* memory) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) item(i, memory);
  });
}

// The same with neighbouring items on one thread, which is the same in every call, so that it finds their data in its
// caches and TLB. A thread that finishes early takes items of the others.
template <class Item>
bool spread_near(int64_t items, int threads, size_t bytes, Item item) {
  if (threads > items) threads = (int)items;
  if (threads <= 1) return spread(items, threads, bytes, item);
  struct alignas(64) Run {
    std::atomic<int64_t> next;
    int64_t end;
  };
  std::unique_ptr<Run[]> runs(new (std::nothrow) Run[(size_t)threads]);
  if (!runs) return false;
  for (int t = 0; t < threads; ++t) runs[t].next = items * t / threads, runs[t].end = items * (t + 1) / threads;
  return with_team(threads, bytes, [&](int me, char* memory) {
    for (int t = 0; t < threads; ++t) {
      Run& run = runs[(me + t) % threads];
      for (int64_t i; (i = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end;) item(i, memory);
    }
  });
}

// The number of threads that the caller asks for, or of all
inline int all_threads(int threads) {
#ifdef CLEARHEAD_STD_THREADS
  return threads > 0 ? threads : 4;
#else
  return threads > 0 ? threads : omp_get_max_threads();
#endif
}

// Waking a thread costs a few microseconds, and pays from so many multiply-adds on.
constexpr double kWorthAThread = 4e5;

inline int threads_for(double multiply_adds, int threads) {
  threads = all_threads(threads);
  const double worth = multiply_adds / kWorthAThread;
  return worth < threads ? (worth < 1 ? 1 : (int)worth) : threads;
}

}  // namespace clearhead
