// For the thread sanitizer: calls the kernel from several threads at once, each call on a team of threads. Every result
// must have the bits of the first. Built and run by native/check/sanitize.sh.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>

#include "host/dispatch.h"

using namespace clearhead;

namespace {

constexpr int64_t kBatch = 1, kHead = 2, kQuery = 300, kSource = 333, kDim = 32;

struct Problem {
  std::vector<float> q, k, v, out, bias, row_max, row_scale;
  std::vector<float> lse, entropy, max_score, top, received, cell_sum, cell_max;
  std::vector<float> dq, dk, dv, dbias, row_terms;
  std::vector<int64_t> sources;
  std::vector<int32_t> start, stop, query_edges, source_edges;
  int64_t query;

  explicit Problem(int64_t query) : query(query) {
    std::mt19937 engine(7);
    std::normal_distribution<float> normal;
    auto fill = [&](std::vector<float>& x, int64_t count) {
      x.resize((size_t)count);
      for (float& number : x) number = normal(engine);
    };
    const int64_t rows_all = kBatch * kHead * query;
    fill(q, rows_all * kDim), fill(k, kHead * kSource * kDim), fill(v, kHead * kSource * kDim);
    out.resize(q.size()), bias.resize(query * kSource);
    dq.resize(q.size()), dk.resize(k.size()), dv.resize(v.size()), dbias.resize(bias.size());
    lse.resize(rows_all), entropy.resize(rows_all), row_max.resize(rows_all), row_scale.resize(rows_all);
    row_terms.resize(rows_all), max_score.resize(rows_all);
    top.resize(rows_all * 3), sources.resize(rows_all * 3);
    received.resize(4 * kHead * kSource), cell_sum.resize(4 * kHead * 9), cell_max.resize(4 * kHead * 9);
    for (int64_t i = 0; i < query; ++i) start.push_back((int32_t)(i / 2)), stop.push_back((int32_t)(i + 20));
    for (int64_t i = 0; i < 4; ++i)
      query_edges.push_back((int32_t)(query * i / 3)), source_edges.push_back((int32_t)(kSource * i / 3));
  }

  Forward call() {
    Forward work{};
    work.batch = kBatch, work.head = work.source_head = kHead, work.query = work.query_total = query;
    work.source = kSource, work.head_dim = work.value_dim = kDim, work.scale = 0.2f;
    auto view = [](std::vector<float>& x, int64_t positions) {
      return View{(char*)x.data(), kHead * positions * kDim, positions * kDim, kDim};
    };
    work.q = view(q, query), work.k = view(k, kSource), work.v = view(v, kSource), work.out = view(out, query);
    work.mask.start = start.data(), work.mask.stop = stop.data(), work.mask.ranges = 1;
    work.lse = lse.data(), work.entropy = entropy.data(), work.row_max = row_max.data(),
    work.row_scale = row_scale.data(), work.max_score = max_score.data();
    work.top = 3, work.top_weights = top.data(), work.top_sources = sources.data();
    work.slots = 4, work.received = received.data(), work.query_cells = work.source_cells = 3;
    work.query_edges = query_edges.data(), work.source_edges = source_edges.data();
    work.cell_sum = cell_sum.data(), work.cell_max = cell_max.data();
    return work;
  }

  bool run(const Kernel& kernel) {
    Forward work = call();
    if (!forward(kernel, work, 4)) return false;
    Backward gradient{};
    gradient.forward = call(), gradient.grad_out = gradient.forward.out;
    auto view = [](std::vector<float>& x, int64_t positions) {
      return View{(char*)x.data(), kHead * positions * kDim, positions * kDim, kDim};
    };
    gradient.dq = view(dq, query), gradient.dk = view(dk, kSource), gradient.dv = view(dv, kSource);
    gradient.forward.bias = {bias.data(), 0, 0, kSource, 1}, gradient.dbias = {dbias.data(), 0, 0, 0, kSource, 1};
    gradient.readings.received = received.data(), gradient.row_terms = row_terms.data();
    std::fill(dbias.begin(), dbias.end(), 0.f), std::fill(row_terms.begin(), row_terms.end(), 0.f);
    return backward(kernel, gradient, 4);
  }

  bool same(const Problem& other) const {
    auto equal = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return equal(out, other.out) && equal(max_score, other.max_score) && equal(received, other.received) &&
           equal(cell_sum, other.cell_sum) && equal(dq, other.dq) && equal(dk, other.dk) && equal(dv, other.dv) &&
           equal(dbias, other.dbias) && sources == other.sources;
  }
};

}  // namespace

int main() {
  int failures = 0;
  for (const std::string& name : available()) {
    choose(name);
    std::string error;
    const Kernel& kernel = *current(error);
    for (int64_t query : {kQuery, (int64_t)2}) {
      Problem first(query);
      failures += !first.run(kernel);
      std::vector<std::thread> callers;
      std::vector<int> failed(3);
      for (int t = 0; t < 3; ++t)
        callers.emplace_back([&, t] {
          Problem again(query);
          failed[t] = !again.run(kernel) || !again.same(first);
        });
      for (std::thread& caller : callers) caller.join();
      for (int f : failed) failures += f;
    }
    std::printf("%s: %d failures\n", name.c_str(), failures);
  }
  return failures != 0;
}
