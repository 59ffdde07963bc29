"""The compiled CPU kernel: the context and the readings, in one pass.

The fallback computes the readings and the gradients that the kernel does not support.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from clearhead._core import active_transforms, traced_transform
from clearhead.attention.impl import ops
from clearhead.attention.impl.autograd import (
    bare,
    check_storages,
    constants,
    filled,
    masks_of,
    tensors_of,
    through,
    wants_gradient,
    wrapped,
)
from clearhead.attention.impl.native import kernel
from clearhead.attention.impl.native.backward import ReadingGrads, backward
from clearhead.attention.impl.native.call import Inputs, sparse
from clearhead.attention.impl.native.forward import LARGEST, Results, forward, in_range
from clearhead.attention.impl.native.operator import Operator
from clearhead.attention.impl.native.readings import KINDS, supported, supported_grads
from clearhead.attention.problem import Problem, default_scale
from clearhead.masks import Mask
from clearhead.readings import Reading

__all__ = ["Native"]

PLAIN = (Tensor, torch.nn.Parameter)


class Native:
    """The implementation by the compiled kernel. It serves plain CPU tensors."""

    name = "native"

    def __init__(self, fallback: Any, reference: Any):
        # The reference computes readings of a traced call, batched gradients, and what the fallback
        # does not support either.
        self.fallback, self.reference = fallback, reference
        self.operator = Operator(self._out_of_range, fallback)

    def state(self) -> str:
        """Say whether the kernel is there, and for which instruction sets."""
        if kernel._native is None:
            return f"not there ({kernel.MISSING})"
        return f"{kernel._native.isa()} (of {', '.join(kernel._native.available())})"

    def unsupported_reasons(self, problem: Problem, read: tuple[Reading, ...]) -> list[str]:
        """List why the kernel cannot serve the call."""
        if kernel._native is None:
            return [f"the compiled kernel is not there: {kernel.MISSING}"]
        # `is_exporting()` is always true while torch 2.10 compiles.
        tracing = torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag
        # The operator that stands in a traced graph knows no transform but its own gradient.
        transformed = ["a torch.func transform is traced"] if tracing and traced_transform() else []
        reasons = transformed if tracing else active_transforms()
        reasons += _unsupported_tensors(problem)
        if not (reasons or tracing or all(map(_lies_in_memory, tensors_of(problem)))):
            reasons.append("an input has no memory with its values at aligned addresses")
        return reasons

    def plain(self, query: Any, key: Any, value: Any, mask: Any, scale: Any) -> Tensor | None:
        """The context of a call that passes the fast checks, or None: it needs the full checks.

        It raises no error that the full checks would not raise, and has the same bits.
        """
        compiled = kernel._native
        if compiled is None or active_transforms() or torch.is_autocast_enabled("cpu"):
            return None
        if mask is not None and not (isinstance(mask, Mask) and mask.relative):
            return None
        call = compiled.fast_call(query, key, value, scale)
        if call is None:
            return None
        if mask is not None:
            # The kernel reads the ranges while it runs: this name keeps them alive.
            ranges: Any = mask.ranges(call.query, call.source)
            call.set_ranges(*ranges.address)
        if not call.run(0):
            return call.context
        if query.ndim < 4:
            return None
        scale = default_scale(query.shape[-1]) if scale is None else scale
        return self._out_of_range(Problem(query, key, value, mask, scale), ())[0]

    def attend(self, problem: Problem, read: tuple[Reading, ...]) -> tuple[Tensor, list[Any]]:
        """Return the context and the values of the readings."""
        if torch.compiler.is_compiling():
            return ops.attend(problem, read, self.reference)
        try:
            if not wants_gradient(problem):
                return self.forward(problem, read)[:2]
            trees: list[Any] = []
            found: Any = _Attend.apply(self, problem, read, trees, *tensors_of(problem))
            if not read:
                return found, []
            context, *flat = found
            return context, pytree.tree_unflatten(flat, trees[0])
        except kernel.Sparse:
            return self._next(problem, read).attend(problem, read)
        except kernel.OutOfRange:
            # Whether it is raised depends only on the context: looking changes nothing.
            return self._out_of_range(problem, read)

    def readings_only(self, problem: Problem, read: tuple[Reading, ...]) -> list[Any]:
        """Return the values of the readings, without a gradient and without the context."""
        with torch.no_grad():
            if torch.compiler.is_compiling():
                return self.attend(problem, read)[1]
            try:
                return self.forward(problem, read, mix=False)[1]
            except kernel.OutOfRange:
                return self._next(problem, read).readings_only(problem, read)

    def forward(
        self, problem: Problem, read: tuple[Reading, ...], graph: bool = False, mix: bool = True
    ) -> tuple[Any, list[Any], Results | None]:
        """Run the kernel, and the fallback for the readings that it does not support.

        The context is there if it is to `mix` the values.
        """
        inputs = Inputs(problem)
        if inputs.ranges is None and sparse(problem):
            raise kernel.Sparse
        ours = supported(inputs, read) if read else ()
        out, results = (
            forward(inputs, ours, graph, mix=mix, turned=graph) if mix or ours else (None, None)
        )
        shape = problem.query.shape
        context = out if out is None or len(shape) == 4 else out.reshape(*shape[:-1], out.shape[-1])
        if not read:
            return context, [], results
        others = tuple(reading for reading in read if reading not in ours)
        values = self.fallback.readings_only(problem, others) if others else []
        found = dict(zip(others, values, strict=True))
        for reading in ours:
            found[reading] = _batched(results.value(reading), shape)  # type: ignore[union-attr]
        return context, [found[reading] for reading in read], results

    def attend_part(self, problem: Problem) -> tuple[Tensor, Tensor] | None:
        """The context and the log-sum-exp in float64, or None where the fallback serves it."""
        try:
            context, _, results = self.forward(problem, (), graph=True)
        except kernel.OutOfRange:
            return None
        assert results is not None
        # In fp32 a large log-sum-exp would be known less exactly than the weights are.
        largest, inverse = results.softmax.double()  # type: ignore[union-attr]
        lse = torch.where(results.lse == -torch.inf, -torch.inf, largest - inverse.log())
        return context, lse.reshape(context.shape[:-1])

    def part_gradient(
        self, problem: Problem, lse: Tensor, grad: Tensor, terms: Tensor, needs: Sequence[bool]
    ) -> list[Tensor | None] | None:
        """The gradients of a part of a larger map, or None where it is out of the kernel's range.

        `lse` and `terms` are those of the whole rows, (*batch, head, query).
        """
        finite = all(bool(x.isfinite().all()) for x in (*tensors_of(problem)[:3], grad))
        empty = lse == -torch.inf
        if not (finite and bool((empty | (lse.abs() <= LARGEST)).all())):
            return None
        inputs = Inputs(problem)
        # The weight is exp(score - lse): as if lse, rounded, were the largest score.
        lse = lse.masked_fill(empty, 0)
        rounded = lse.float()
        inverse = (rounded - lse).exp().masked_fill(empty, 0).float()
        softmax = torch.stack([rounded, inverse]).reshape(2, *inputs.shape)
        rows = ReadingGrads(inputs, softmax[0])
        rows.terms.copy_(-terms.reshape(inputs.shape))
        saved = (torch.zeros_like(grad), softmax[0], softmax)
        return backward(inputs, saved, grad, rows, needs)

    def fallback_gradient(
        self, problem: Problem, read: tuple[Reading, ...], gradients: Any, needs: Any
    ) -> list[Tensor | None]:
        """Compute the gradients by the fallback, or by the reference where that cannot serve."""
        return through(self._next(problem, read), problem, read, gradients, needs)

    def _next(self, problem: Problem, read: tuple[Reading, ...]) -> Any:
        with torch.enable_grad():
            reasons = self.fallback.unsupported_reasons(problem, read)
        return self.reference if reasons else self.fallback

    def _out_of_range(
        self, problem: Problem, read: tuple[Reading, ...]
    ) -> tuple[Tensor, list[Any]]:
        """Use the fallback's results, except that rows in range keep the kernel's bits.

        So a NaN or a huge number changes no row that may not read it.
        """
        context, values = self._next(problem, read).attend(problem, read)
        if context.requires_grad:
            return context, values
        with torch.no_grad():
            ours, good = in_range(problem)
        return torch.where(good, ours, context), values


def _unsupported_tensors(problem: Problem) -> list[str]:
    query, key, value = problem.query, problem.key, problem.value
    reasons = []
    if not query.is_cpu:
        reasons.append(f"the inputs are on {query.device}, not on the CPU")
    if query.dtype not in kernel.TYPES:
        reasons.append(f"{query.dtype} is not float32, bfloat16 or float16")
    if query.shape[-1] > 256 or value.shape[-1] > 256:
        reasons.append("head_dim or value_dim is above 256")
    if not (query.numel() and key.numel() and value.numel()):
        reasons.append("an axis has no elements")
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN):
        reasons.append("an input is a tensor subclass")
    if problem.corner is not None and problem.seed is not None:
        reasons.append("dropout of a part of a larger map")
    for extra in (problem.bias, problem.sinks):
        if extra is not None and type(extra) not in PLAIN:
            reasons.append("bias or sinks are a tensor subclass")
    return reasons


def _lies_in_memory(x: Tensor | None) -> bool:
    """Whether its numbers are readable at aligned addresses, unlike those of some wrappers."""
    if x is None:
        return True
    try:
        place = x.data_ptr()
    except RuntimeError:
        return False
    return place % x.element_size() == 0 and (place != 0 or not x.numel())


def _batched(value: Any, shape: tuple[int, ...]) -> Any:
    if len(shape) == 4:
        return value
    if isinstance(value, tuple):
        return type(value)(*(_batched(x, shape) for x in value))
    return value.reshape(*shape[:-3], *value.shape[1:])


class _Attend(torch.autograd.Function):
    """The kernel's forward and backward; the fallback differentiates unsupported readings."""

    @staticmethod
    def forward(ctx: Any, native: Native, problem: Problem, read: Any, trees: list, *inputs: Any):
        context, values, results = native.forward(problem, read, graph=True)
        assert results is not None
        ctx.native, ctx.problem, ctx.read = native, bare(problem), read
        ctx.set_materialize_grads(False)
        if not read:
            masks = masks_of(problem, read)
            ctx.save_for_backward(*inputs, context, results.lse, results.softmax, *masks)
            return context
        flat, ctx.tree = pytree.tree_flatten(values)
        trees.append(ctx.tree)
        kept = [x for r, v in zip(read, values, strict=True) if _keeps_value(r)
                for x in pytree.tree_leaves(v)]  # fmt: skip
        kept += masks_of(problem, read)
        ctx.save_for_backward(*inputs, context, results.lse, results.softmax, *kept)
        flat = [x.view_as(x) for x in flat]
        ctx.mark_non_differentiable(*constants(read, pytree.tree_unflatten(flat, ctx.tree)))
        return context, *flat

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        # Read once: where torch.utils.checkpoint recomputes them, it does so once.
        saved = ctx.saved_tensors
        needs, problem = ctx.needs_input_grad[4:], filled(ctx.problem, saved[:5])
        check_storages(problem, saved[5])
        if wrapped(gradients):
            found = through(ctx.native.reference, problem, ctx.read, gradients, needs)
        elif torch.is_grad_enabled():
            found = ctx.native.fallback_gradient(problem, ctx.read, gradients, needs)
        else:
            found = _gradient(problem, ctx, saved, gradients, needs)
        return None, None, None, None, *found


def _keeps_value(reading: Reading) -> bool:
    kind = KINDS.get(type(reading))
    return kind is not None and kind.grad is not None and kind.grad.needs_value


def _gradient(
    problem: Problem, ctx: Any, saved: Any, gradients: Any, needs: Any
) -> list[Tensor | None]:
    """The gradients of a problem's tensors, by the kernel as far as it supports them."""
    outer, *flat = gradients
    context, lse, softmax, *kept = saved[5:]
    inputs, reading_grads, others = Inputs(problem), None, []
    if any(x is not None for x in flat):
        reading_grads, others = _reading_grads(ctx, inputs, lse, kept, flat)
    found: list[Tensor | None] = [None] * 5
    if outer is not None or reading_grads is not None:
        found = backward(inputs, (context, lse, softmax), outer, reading_grads, needs)
    if others:
        read, grads = zip(*others, strict=True)
        leaves = [None, *pytree.tree_leaves(grads)]
        more = ctx.native.fallback_gradient(problem, read, leaves, needs)
        found = [b if a is None else a if b is None else a + b
                 for a, b in zip(found, more, strict=True)]  # fmt: skip
    return found


def _reading_grads(
    ctx: Any, inputs: Inputs, lse: Tensor, kept: list[Tensor], flat: Any
) -> tuple[ReadingGrads | None, list[tuple[Reading, Any]]]:
    """The gradients of the readings: those that the kernel supports, and the others."""
    reading_grads, others = None, []
    ours, kept_values = supported_grads(inputs, ctx.read), iter(kept)
    for reading, grad in zip(ctx.read, pytree.tree_unflatten(flat, ctx.tree), strict=True):
        value = None
        if _keeps_value(reading):
            tree = pytree.tree_structure(grad)
            value = pytree.tree_unflatten([next(kept_values) for _ in range(tree.num_leaves)], tree)
        if not any(x is not None for x in pytree.tree_leaves(grad)):
            continue
        if reading not in ours:
            others.append((reading, grad))
            continue
        reading_grads = reading_grads or ReadingGrads(inputs, lse)
        reading_grads.add(reading, value, grad)
    return reading_grads, others
