// Reads torch tensors without a header or library of torch: their addresses, sizes and strides come through DLPack's C
// exchange API (https://dmlc.github.io/dlpack), in a tenth of the time of calls of the Python attributes.
#pragma once
#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>

#include "host/kernel.h"

namespace clearhead {

namespace nb = nanobind;
using Axes4 = std::array<int64_t, 4>;

// As in dlpack.h 1.3
struct DLTensor {
  void* data;
  int32_t device, device_number, rank;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t *shape, *stride;
  uint64_t offset;
};
static_assert(sizeof(DLTensor) == 48);
struct DLPackExchange {
  uint32_t major, minor;
  DLPackExchange* older;
  void *allocate, *from_python, *to_python;
  int (*borrow)(void* object, DLTensor* to);  // `to` is valid as long as the object
  void* stream;
};

// The objects of torch that are used, looked up once. They are never released: the interpreter may end before this
// module.
struct Torch {
  PyObject *tensor, *parameter, *is_neg, *requires_grad, *is_grad_enabled, *empty_like, *new_empty, *contiguous, *names;
  const DLPackExchange* exchange = nullptr;

  Torch() {
    const nb::module_ torch = nb::module_::import_("torch");
    const nb::object type = torch.attr("Tensor");
    tensor = kept(type), parameter = kept(torch.attr("nn").attr("Parameter"));
    is_neg = kept(type.attr("is_neg")), requires_grad = kept(type.attr("requires_grad"));
    new_empty = kept(type.attr("new_empty")), empty_like = kept(torch.attr("empty_like"));
    is_grad_enabled = kept(torch.attr("is_grad_enabled"));
    contiguous = kept(torch.attr("contiguous_format")), names = kept(nb::make_tuple("memory_format"));
    const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;
    const auto* found = (const DLPackExchange*)PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    if (found->major == 1 && found->borrow) exchange = found;
  }
  static PyObject* kept(nb::object x) { return x.release().ptr(); }
};

inline const Torch& torch() {
  static const Torch names;
  return names;
}

// Whether torch returned exactly this object; an error is a null object.
inline bool is(const nb::object& answer, PyObject* what) { return answer.ptr() == what; }
inline nb::object get(PyObject* attribute, PyObject* x) {
  return nb::steal(Py_TYPE(attribute)->tp_descr_get(attribute, x, (PyObject*)Py_TYPE(x)));
}
inline nb::object call(PyObject* function, PyObject* x) { return nb::steal(PyObject_CallOneArg(function, x)); }

// A tensor as (batch, head, position, feature); missing axes have size 1 and stride 0.
struct Tensor {
  // Where axis `i` of a tensor of this rank goes: with rank 3 the head is missing, with rank 2 the batch too.
  static int axis(int rank, int i) { return i < rank - 2 ? i : 4 - rank + i; }
  int rank, type;
  bool requires_grad;
  uintptr_t place;
  Axes4 shape{1, 1, 1, 1}, stride{0, 0, 0, 0};
};

inline int type_of(const DLTensor& x) {
  constexpr uint8_t real = 2, brain = 4;
  if (x.lanes != 1) return -1;
  if (x.code == real && x.bits == 32) return (int)Type::f32;
  if (x.code == real && x.bits == 16) return (int)Type::f16;
  return x.code == brain && x.bits == 16 ? (int)Type::bf16 : -1;
}

// Returns false unless it is a torch.Tensor or Parameter on the CPU, of a supported type and rank, and aligned; a
// Python error may be set.
inline bool read_tensor(PyObject* x, Tensor& to) {
  const Torch& t = torch();
  PyObject* kind = (PyObject*)Py_TYPE(x);
  DLTensor found;
  constexpr int32_t cpu = 1;
  if ((kind != t.tensor && kind != t.parameter) || !t.exchange || t.exchange->borrow(x, &found)) return false;
  to.rank = found.rank, to.type = type_of(found), to.place = (uintptr_t)found.data;
  if (found.device != cpu || found.offset || to.type < 0 || to.rank < 2 || to.rank > 4 || !to.place) return false;
  if (to.place % (found.bits / 8)) return false;
  for (int i = 0; i < to.rank; ++i) {
    to.shape[Tensor::axis(to.rank, i)] = found.shape[i];
    to.stride[Tensor::axis(to.rank, i)] = found.stride[i];
  }
  to.requires_grad = !is(get(t.requires_grad, x), Py_False);
  return is(call(t.is_neg, x), Py_False);
}

// A contiguous tensor of the batch, heads and positions of `query`, `width` features each.
inline nb::object make_context(PyObject* query, const Tensor& q, int64_t width) {
  const Torch& t = torch();
  if (width == q.shape[3]) {
    PyObject* given[] = {query, t.contiguous};
    return nb::steal(PyObject_Vectorcall(t.empty_like, given, 1, t.names));
  }
  nb::list shape;
  for (int i = 0; i < q.rank - 1; ++i) shape.append(q.shape[Tensor::axis(q.rank, i)]);
  shape.append(width);
  PyObject* given[] = {query, shape.ptr()};
  return nb::steal(PyObject_Vectorcall(t.new_empty, given, 2, nullptr));
}

}  // namespace clearhead
