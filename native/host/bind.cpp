// The Python bindings: all addresses, sizes and strides are checked before they reach a kernel.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/dispatch.h"
#include "host/tensor.h"

using namespace clearhead;

namespace {

constexpr int64_t kMaxDim = 256;

void require(bool holds, const char* rule) {
  if (!holds) throw nb::value_error(rule);
}

int64_t times(int64_t a, int64_t b) {
  int64_t result;
  require(!__builtin_mul_overflow(a, b, &result), "a size overflows");
  return result;
}

template <class T>
T* address(uintptr_t place, bool needed = true) {
  require(place % alignof(T) == 0, "an address is not aligned to its elements");
  require(place || !needed, "an address is missing");
  return (T*)place;
}

// The offset of the last element must fit an int64, in bytes too.
void check_reach(const Axes4& shape, const Axes4& stride) {
  int64_t reach = 0;
  for (int i = 0; i < 4; ++i) {
    require(shape[i] >= 0 && stride[i] >= 0, "sizes and strides must not be negative");
    require(!__builtin_add_overflow(reach, times(shape[i], stride[i]), &reach), "a size overflows");
  }
  times(reach, 8);
}

View view(uintptr_t place, const Axes4& shape, const Axes4& stride, Type type) {
  check_reach(shape, stride);
  require(stride[3] == 1 || shape[3] <= 1, "the features must lie side by side");
  const bool empty = !shape[0] || !shape[1] || !shape[2] || !shape[3];
  char* data = type == Type::f32 ? (char*)address<float>(place, !empty) : (char*)address<uint16_t>(place, !empty);
  return {data, stride[0], stride[1], stride[2]};
}

const Kernel* kernel_or_throw() {
  std::string error;
  const Kernel* kernel = current(error);
  if (!kernel) throw std::runtime_error(error);
  return kernel;
}

struct Call {
  Forward work{};
  Backward gradient{};
  std::vector<MassGrad> masses;

  Call(int type, uintptr_t q, Axes4 q_shape, Axes4 q_stride, uintptr_t k, Axes4 k_shape, Axes4 k_stride, uintptr_t v,
       Axes4 v_shape, Axes4 v_stride, uintptr_t out, Axes4 out_stride, float scale) {
    require(type >= 0 && type <= 2, "the type is 0 (float32), 1 (float16) or 2 (bfloat16)");
    work.type = (Type)type;
    work.batch = q_shape[0], work.head = q_shape[1], work.query = q_shape[2], work.head_dim = q_shape[3];
    work.source_head = k_shape[1], work.source = k_shape[2], work.value_dim = v_shape[3];
    require(k_shape[0] == work.batch && v_shape[0] == work.batch, "batch sizes differ");
    require(v_shape[1] == work.source_head && v_shape[2] == work.source, "key and value sizes differ");
    require(k_shape[3] == work.head_dim, "query and key widths differ");
    require(work.source_head > 0 && work.head % work.source_head == 0, "heads must be a multiple of source heads");
    require(work.head_dim <= kMaxDim && work.value_dim <= kMaxDim, "at most 256 features");
    require(work.query < INT32_MAX - 64 && work.source < INT32_MAX - 64, "at most 2^31 positions");
    work.q = view(q, q_shape, q_stride, work.type);
    work.k = view(k, k_shape, k_stride, work.type);
    work.v = view(v, v_shape, v_stride, work.type);
    // Without an address for the context only the readings are computed.
    if (out) work.out = view(out, {q_shape[0], q_shape[1], q_shape[2], v_shape[3]}, out_stride, work.type);
    work.scale = scale, work.query_total = work.query;
  }

  void set_part(int64_t first, int64_t total) {
    require(first >= 0 && first <= total && work.query <= total - first, "the part must lie inside the whole");
    work.first_query = first, work.query_total = total;
  }

  static void ranges(Edges& edges, uintptr_t start, uintptr_t stop, int64_t count, int64_t step, int64_t batch,
                     int64_t head) {
    require(count > 0 && count <= kMaxRanges, "a query has one range of sources, or a few");
    require(step >= 0 && batch >= 0 && head >= 0, "strides must not be negative");
    edges.ranges = count, edges.range_stride = step;
    edges.start = address<int32_t>(start), edges.stop = address<int32_t>(stop);
    edges.range_batch = batch, edges.range_head = head;
  }
  void bytes(Edges& edges, uintptr_t place, Axes4 stride) const {
    check_reach({work.batch, work.head, work.query, work.source}, stride);
    edges.bytes = address<uint8_t>(place);
    edges.batch = stride[0], edges.head = stride[1], edges.query = stride[2], edges.source = stride[3];
  }
  void set_ranges(uintptr_t start, uintptr_t stop, int64_t count, int64_t step, int64_t batch, int64_t head) {
    ranges(work.mask, start, stop, count, step, batch, head);
  }
  void set_edges(uintptr_t place, Axes4 stride) { bytes(work.mask, place, stride); }
  void set_bias(uintptr_t place, Axes4 stride) {
    check_reach({work.batch, work.head, work.query, work.source}, stride);
    work.bias = {address<float>(place), stride[0], stride[1], stride[2], stride[3]};
  }
  void set_dropout(uint64_t seed, uint64_t least, float scale) {
    require(least <= (uint64_t)1 << 53, "the hash of a weight has 53 bits");
    times(times(times(work.batch, work.head), work.query_total), work.source);
    work.dropout = {seed, least, scale};
  }
  void set_softcap(float cap) { work.softcap = cap; }
  void set_sinks(uintptr_t place) { work.sinks = address<float>(place); }
  void set_lse(uintptr_t place) { work.lse = address<float>(place); }
  void set_softmax(uintptr_t most, uintptr_t scale) {
    work.row_max = address<float>(most), work.row_scale = address<float>(scale);
  }
  void set_entropy(uintptr_t place) { work.entropy = address<float>(place); }
  void set_max_score(uintptr_t place) { work.max_score = address<float>(place); }
  void set_top(int64_t count, uintptr_t weights, uintptr_t sources) {
    require(count > 0, "top needs a positive count");
    times(times(times(work.batch, work.head), work.query_total), times(count, 8));
    work.top = count, work.top_weights = address<float>(weights), work.top_sources = address<int64_t>(sources);
  }
  void set_distance(uintptr_t place, int64_t offset) {
    work.distance = address<float>(place), work.distance_offset = offset;
  }
  void set_mass(uintptr_t place) { work.mass = address<float>(place); }
  void set_mass_ranges(uintptr_t start, uintptr_t stop, int64_t count, int64_t step, int64_t batch, int64_t head) {
    ranges(work.mass_edges, start, stop, count, step, batch, head);
  }
  void set_mass_edges(uintptr_t place, Axes4 stride) { bytes(work.mass_edges, place, stride); }
  void set_rows(uintptr_t row_of, int64_t count, uintptr_t rows) {
    times(times(times(work.batch, work.head), count), times(work.source, 8));
    work.row_of = address<int32_t>(row_of), work.row_count = count, work.rows = address<float>(rows);
  }
  void set_slots(int64_t slots) {
    require(slots > 0, "slots must be positive");
    work.slots = slots;
  }
  void set_received(uintptr_t place) { work.received = address<float>(place); }
  void set_cells(int64_t queries, int64_t sources, uintptr_t query_edges, uintptr_t source_edges, uintptr_t sum,
                 uintptr_t most) {
    cells(queries, sources, query_edges, source_edges);
    work.cell_sum = address<float>(sum), work.cell_max = address<float>(most);
  }
  void cells(int64_t queries, int64_t sources, uintptr_t query_edges, uintptr_t source_edges) {
    require(queries > 0 && sources > 0, "cells must be positive");
    work.query_cells = queries, work.source_cells = sources;
    work.query_edges = address<int32_t>(query_edges), work.source_edges = address<int32_t>(source_edges);
    require(work.query_edges[0] == 0 && work.query_edges[queries] == work.query_total, "cells must cover the queries");
    require(work.source_edges[0] == 0 && work.source_edges[sources] == work.source, "cells must cover the sources");
  }

  // Returns true if scores or sums are out of range, so that the results may be wrong.
  bool run(int threads) {
    const Kernel* kernel = kernel_or_throw();
    if (!work.batch || !work.head || !work.query) return false;
    require((!work.received && !work.cell_sum) || work.slots > 0, "sums over queries need slots");
    std::atomic<bool> out_of_range{false};
    work.out_of_range = &out_of_range;
    bool ok;
    {
      nb::gil_scoped_release released;
      ok = forward(*kernel, work, threads);
    }
    work.out_of_range = nullptr;
    if (!ok) throw std::bad_alloc();
    return out_of_range;
  }

  void set_row_terms(uintptr_t place) { gradient.row_terms = address<float>(place); }
  void set_entropy_grad(uintptr_t place) { gradient.readings.entropy = address<float>(place); }
  void set_distance_grad(uintptr_t place, int64_t offset) {
    gradient.readings.distance = address<float>(place), work.distance_offset = offset;
  }
  // The gradient of the mass of the edges that were set last.
  void add_mass_grad(uintptr_t place) {
    require(work.mass_edges.start || work.mass_edges.bytes, "the gradient of a mass needs its edges");
    masses.push_back({work.mass_edges, address<float>(place)});
    work.mass_edges = {};
  }
  void set_scores_grad(uintptr_t place) {
    times(times(times(work.batch, work.head), work.query_total), times(work.source, 8));
    gradient.readings.scores = address<float>(place);
  }
  void set_received_grad(uintptr_t place) { gradient.readings.received = address<float>(place); }
  void set_rows_grad(uintptr_t row_of, int64_t count, uintptr_t place) {
    times(times(times(work.batch, work.head), count), times(work.source, 8));
    work.row_of = address<int32_t>(row_of), work.row_count = count;
    gradient.readings.rows = address<float>(place);
  }
  void set_cells_grad(int64_t queries, int64_t sources, uintptr_t query_edges, uintptr_t source_edges,
                      uintptr_t place) {
    cells(queries, sources, query_edges, source_edges);
    gradient.readings.cells = address<float>(place);
  }
  void set_top_grad(int64_t count, uintptr_t place, uintptr_t sources) {
    require(count > 0, "top needs a positive count");
    times(times(times(work.batch, work.head), work.query_total), times(count, 8));
    gradient.readings.top_count = count;
    gradient.readings.top = address<float>(place), gradient.readings.top_sources = address<int64_t>(sources);
  }
  void set_bias_grad(uintptr_t place, Axes4 stride) {
    check_reach({work.batch, work.head, work.query, work.source}, stride);
    gradient.dbias = {address<float>(place), 0, stride[0], stride[1], stride[2], stride[3]};
  }

  // Writes the gradients of query, key and value, in the type of the inputs or, with `wide`, in fp32.
  void differentiate(uintptr_t grad, Axes4 grad_stride, uintptr_t dq, Axes4 dq_stride, uintptr_t dk, Axes4 dk_stride,
                     uintptr_t dv, Axes4 dv_stride, bool wide, int threads) {
    const Kernel* kernel = kernel_or_throw();
    if (!work.batch || !work.head || !work.query || !work.source) return;
    require(work.row_max, "gradients need the maxima and sums of the rows");
    require(work.out.data || !work.value_dim, "gradients need the context");
    const ReadingGrads& given = gradient.readings;
    require(gradient.row_terms || !(given.received || given.rows || given.cells), "sums need the rows' terms");
    require(work.bias.data || !gradient.dbias.data, "the gradient of a bias needs the bias");
    const Type type = wide ? Type::f32 : work.type;
    gradient.forward = work, gradient.type = type;
    gradient.readings.masses = masses.data(), gradient.readings.mass_count = (int64_t)masses.size();
    const Axes4 query{work.batch, work.head, work.query, work.head_dim};
    const Axes4 key{work.batch, work.source_head, work.source, work.head_dim};
    const Axes4 value{work.batch, work.source_head, work.source, work.value_dim};
    gradient.grad_out = view(grad, {work.batch, work.head, work.query, work.value_dim}, grad_stride, work.type);
    gradient.dq = view(dq, query, dq_stride, type), gradient.dk = view(dk, key, dk_stride, type);
    gradient.dv = view(dv, value, dv_stride, type);
    times(times(times(work.source, work.batch), times(work.head, work.query)), 4 * kMaxDim);
    bool ok;
    {
      nb::gil_scoped_release released;
      ok = backward(*kernel, gradient, threads);
    }
    if (!ok) throw std::bad_alloc();
  }
};

// A call that returns only the context, with the tensor that receives it.
struct FastCall : Call {
  nb::object context;

  FastCall(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, float scale, nb::object context)
      : Call(q.type, q.place, q.shape, q.stride, k.place, k.shape, k.stride, v.place, v.shape, v.stride, out.place,
             out.stride, scale),
        context(std::move(context)) {}
};

// Whether the tensors pass the checks of `attend` and can be read by the kernel as they are.
bool passes_checks(const Tensor& q, const Tensor& k, const Tensor& v) {
  for (const Tensor* x : {&q, &k, &v}) {
    if (x->rank != q.rank || x->type != q.type || x->stride[3] != 1 || x->shape[3] > kMaxDim) return false;
    for (int64_t size : x->shape)
      if (!size) return false;
  }
  return k.shape[0] == q.shape[0] && v.shape[0] == q.shape[0] && q.shape[1] % k.shape[1] == 0 &&
         v.shape[1] == k.shape[1] && v.shape[2] == k.shape[2] && k.shape[3] == q.shape[3];
}

// The fast path: the call, or null if any check fails. The caller then takes the general path, whose errors name the
// rule.
FastCall* fast_call(nb::handle query, nb::handle key, nb::handle value, nb::handle scale) {
  Tensor q, k, v;
  const bool ready = (scale.is_none() || PyFloat_CheckExact(scale.ptr())) && read_tensor(query.ptr(), q) &&
                     read_tensor(key.ptr(), k) && read_tensor(value.ptr(), v) && passes_checks(q, k, v);
  PyErr_Clear();
  if (!ready) return nullptr;
  if ((q.requires_grad || k.requires_grad || v.requires_grad) &&
      !is(nb::steal(PyObject_CallNoArgs(torch().is_grad_enabled)), Py_False))
    return nullptr;
  nb::object context = make_context(query.ptr(), q, v.shape[3]);
  Tensor out;
  if (!context.is_valid() || !read_tensor(context.ptr(), out)) throw nb::python_error();
  require(out.shape == Axes4{q.shape[0], q.shape[1], q.shape[2], v.shape[3]}, "the context has another shape");
  const double factor = scale.is_none() ? 1 / std::sqrt((double)q.shape[3]) : PyFloat_AS_DOUBLE(scale.ptr());
  return new FastCall(q, k, v, out, (float)factor, std::move(context));
}

}  // namespace

NB_MODULE(_native, m) {
  m.attr("contract") = kContract;
  torch();  // looked up before several threads use it
  nb::class_<Call>(m, "Forward")
      .def(nb::init<int, uintptr_t, Axes4, Axes4, uintptr_t, Axes4, Axes4, uintptr_t, Axes4, Axes4, uintptr_t, Axes4,
                    float>())
      .def("set_part", &Call::set_part)
      .def("set_ranges", &Call::set_ranges)
      .def("set_edges", &Call::set_edges)
      .def("set_bias", &Call::set_bias)
      .def("set_dropout", &Call::set_dropout)
      .def("set_softcap", &Call::set_softcap)
      .def("set_sinks", &Call::set_sinks)
      .def("set_lse", &Call::set_lse)
      .def("set_softmax", &Call::set_softmax)
      .def("set_entropy", &Call::set_entropy)
      .def("set_max_score", &Call::set_max_score)
      .def("set_top", &Call::set_top)
      .def("set_distance", &Call::set_distance)
      .def("set_mass", &Call::set_mass)
      .def("set_mass_ranges", &Call::set_mass_ranges)
      .def("set_mass_edges", &Call::set_mass_edges)
      .def("set_rows", &Call::set_rows)
      .def("set_slots", &Call::set_slots)
      .def("set_received", &Call::set_received)
      .def("set_cells", &Call::set_cells)
      .def("run", &Call::run)
      .def("set_row_terms", &Call::set_row_terms)
      .def("set_entropy_grad", &Call::set_entropy_grad)
      .def("set_distance_grad", &Call::set_distance_grad)
      .def("add_mass_grad", &Call::add_mass_grad)
      .def("set_scores_grad", &Call::set_scores_grad)
      .def("set_received_grad", &Call::set_received_grad)
      .def("set_rows_grad", &Call::set_rows_grad)
      .def("set_cells_grad", &Call::set_cells_grad)
      .def("set_top_grad", &Call::set_top_grad)
      .def("set_bias_grad", &Call::set_bias_grad)
      .def("differentiate", &Call::differentiate);
  nb::class_<FastCall, Call>(m, "FastCall")
      .def_ro("context", &FastCall::context)
      .def_prop_ro("query", [](const FastCall& call) { return call.work.query; })
      .def_prop_ro("source", [](const FastCall& call) { return call.work.source; });
  m.def("fast_call", &fast_call, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none());
  m.def("available", &available);
  m.def("isa", [] { return std::string(kernel_or_throw()->name); });
  m.def("block", [] { return kernel_or_throw()->block; });
  m.def("choose", [](const std::string& name) {
    if (choose(name)) return;
    std::string text = "this machine has no " + name + " kernel; it has";
    for (const std::string& other : available()) text += " " + other;
    throw nb::value_error(text.c_str());
  });
  m.def("peak", [](int64_t rounds, int64_t each, bool pairs) {
    const Kernel* kernel = kernel_or_throw();
    require(rounds >= 0 && each >= 0, "rounds and each must not be negative");
    nb::gil_scoped_release released;
    return peak(*kernel, rounds, each, pairs, 0);
  });
  m.def("exp2", [](uintptr_t from, uintptr_t to, int64_t count) {
    const Kernel* kernel = kernel_or_throw();
    require(count >= 0, "count must not be negative");
    kernel->exp2(address<float>(from), address<float>(to), count);
  });
}
