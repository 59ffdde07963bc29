"""The compiled CPU kernel: the context and what can be read on the way, in one pass.

It is chosen where it can serve; `unsupported_reasons` says where it cannot. Readings that it does
not take itself, and gradients that it does not have, come from the next implementation (`rest`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from clearhead._core import active_transforms
from clearhead.attention.impl import ops
from clearhead.attention.impl.autograd import (
    bare,
    filled,
    pull,
    tensors_of,
    wants_gradient,
    wrapped,
)
from clearhead.attention.impl.native import backward, kernel, reading_grads
from clearhead.attention.problem import Problem, default_scale
from clearhead.readings import BlockMapValue, Reading

NAME = "native"
# The implementations that give what the kernel has not, in eager calls and in traced ones; the
# chooser sets them.
rest: Any = None
spec: Any = None

PLAIN = (Tensor, torch.nn.Parameter)


def state() -> str:
    """Say in a few words whether the kernel is there, and for which instruction sets."""
    if kernel._native is None:
        return f"not there ({kernel.MISSING})"
    return f"{kernel._native.isa()} (of {', '.join(kernel._native.available())})"


def unsupported_reasons(problem: Problem, read: tuple[Reading, ...]) -> list[str]:
    """Say why the kernel cannot serve the call."""
    if kernel._native is None:
        return [f"the compiled kernel is not there: {kernel.MISSING}"]
    # `is_exporting()` is always true while torch 2.10 compiles.
    tracing = torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag
    reasons = [] if tracing else active_transforms()
    query, key, value = problem.query, problem.key, problem.value
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
    for extra in (problem.bias, problem.sinks):
        if extra is not None and type(extra) not in PLAIN:
            reasons.append("bias or sinks are a tensor subclass")
    if not (reasons or tracing or all(map(_lies_in_memory, tensors_of(problem)))):
        reasons.append("an input does not lie in memory as its numbers, each at its own place")
    return reasons


def _lies_in_memory(x: Tensor | None) -> bool:
    """Whether there are numbers to read, unlike in some wrappers of torch, at aligned addresses."""
    if x is None:
        return True
    try:
        place = x.data_ptr()
    except RuntimeError:
        return False
    return place % x.element_size() == 0 and (place != 0 or not x.numel())


def plain(query: Any, key: Any, value: Any, mask: Any, scale: Any) -> Tensor | None:
    """The context of a call that is right at first sight, or None: then it needs a closer look.

    Nothing is checked twice, no error is raised that the closer look would not raise, and every bit
    of the context is the same.
    """
    if kernel._native is None or active_transforms() or torch.is_autocast_enabled("cpu"):
        return None
    try:
        return kernel.plain(query, key, value, mask, scale)
    except kernel.OutOfRange:
        if query.ndim < 4:
            return None
        scale = default_scale(query.shape[-1]) if scale is None else scale
        return _out_of_range(Problem(query, key, value, mask, scale), ())[0]


def attend(problem: Problem, read: tuple[Reading, ...]) -> tuple[Tensor, list[Any]]:
    """Return the context and the values of the readings."""
    if torch.compiler.is_compiling():
        return ops.attend(problem, read, spec)
    try:
        if not wants_gradient(problem):
            return _forward(problem, read)[:2]
        specs: list[Any] = []
        found: Any = _Native.apply(problem, read, specs, *tensors_of(problem))
        if not read:
            return found, []
        context, *flat = found
        return context, pytree.tree_unflatten(flat, specs[0])
    except kernel.OutOfRange:
        # Whether it is raised hangs on the context alone: looking changes nothing.
        return _out_of_range(problem, read)


def _out_of_range(problem: Problem, read: tuple[Reading, ...]) -> tuple[Tensor, list[Any]]:
    """The next implementation's answer; rows that are in range keep the kernel's bits.

    So a NaN or a huge number changes no row that may not read it.
    """
    context, values = rest.attend(problem, read)
    if context.requires_grad:
        return context, values
    with torch.no_grad():
        ours, good = kernel.in_range(problem)
    return torch.where(good, ours, context), values


def _forward(
    problem: Problem, read: tuple[Reading, ...], graph: bool = False
) -> tuple[Any, list[Any], Any]:
    inputs = kernel.Inputs(problem)
    taken = kernel.native_readings(inputs, read) if read else ()
    out, results = kernel.forward(inputs, taken, graph)
    shape = problem.query.shape
    context = out if len(shape) == 4 else out.reshape(*shape[:-1], out.shape[-1])
    if not read:
        return context, [], results
    others = tuple(reading for reading in read if reading not in taken)
    found = dict(zip(others, rest.readings_only(problem, others), strict=True)) if others else {}
    for reading in taken:
        found[reading] = _batched(results.value(reading), shape)  # type: ignore[union-attr]
    return context, [found[reading] for reading in read], results


def _batched(value: Any, shape: tuple[int, ...]) -> Any:
    if len(shape) == 4:
        return value
    if isinstance(value, tuple):
        return type(value)(*(_batched(x, shape) for x in value))
    return value.reshape(*shape[:-3], *value.shape[1:])


class _Native(torch.autograd.Function):
    """The kernel's own backward; readings that it lacks are differentiated through the next."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, read: tuple[Reading, ...], specs: list, *inputs: Any):
        context, values, results = _forward(problem, read, graph=True)
        ctx.problem, ctx.read = bare(problem), read
        ctx.set_materialize_grads(False)
        if not read:
            ctx.save_for_backward(*inputs, context, results.lse, results.softmax)
            return context
        flat, ctx.spec = pytree.tree_flatten(values)
        specs.append(ctx.spec)
        # The gradients of some readings need the value.
        kept = [x for r, v in zip(read, values, strict=True) if type(r) in reading_grads.KEPT
                for x in pytree.tree_leaves(v)]  # fmt: skip
        ctx.save_for_backward(*inputs, context, results.lse, results.softmax, *kept)
        flat = [x.view_as(x) for x in flat]
        shown = pytree.tree_unflatten(flat, ctx.spec)
        ctx.mark_non_differentiable(*(x.max for x in shown if isinstance(x, BlockMapValue)))
        return context, *flat

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        # Asked for once: where torch.utils.checkpoint makes them again, it does so once.
        saved = ctx.saved_tensors
        needs, problem = ctx.needs_input_grad[3:], filled(ctx.problem, saved[:5])
        if wrapped(gradients):
            found = _through(spec, problem, ctx.read, gradients, needs)
        elif torch.is_grad_enabled():
            found = _through_rest(problem, ctx.read, gradients, needs)
        else:
            found = _gradient(problem, ctx, saved, gradients, needs)
        return None, None, None, *found


def _gradient(
    problem: Problem, ctx: Any, saved: Any, gradients: Any, needs: Any
) -> list[Tensor | None]:
    """The gradients of the tensors of a problem, by the kernel as far as it has them."""
    outer, *flat = gradients
    context, lse, softmax, *kept = saved[5:]
    handed, changes, others = kernel.Inputs(problem), None, []
    if any(x is not None for x in flat):
        changes, others = _shares(ctx, handed, lse, kept, flat)
    found: list[Tensor | None] = [None] * 5
    if outer is not None or changes is not None:
        out = kernel.four(context)
        found = list(backward.backward(handed, out, lse, softmax, outer, changes, needs))
    if others:
        alone, shares = zip(*others, strict=True)
        leaves = [None, *pytree.tree_leaves(shares)]
        more = _through_rest(problem, alone, leaves, needs)
        found = [b if a is None else a if b is None else a + b
                 for a, b in zip(found, more, strict=True)]  # fmt: skip
    return found


def _shares(
    ctx: Any, inputs: kernel.Inputs, lse: Tensor, values: list[Tensor], flat: Any
) -> tuple[reading_grads.Changes | None, list[tuple[Reading, Any]]]:
    """The gradients of the readings: those that the kernel takes, and the others."""
    changes, others = None, []
    taken = reading_grads.taken(inputs, ctx.read)
    kept = iter(values)
    for reading, share in zip(ctx.read, pytree.tree_unflatten(flat, ctx.spec), strict=True):
        value = reading_grads.value(reading, kept) if type(reading) in reading_grads.KEPT else None
        if not any(x is not None for x in pytree.tree_leaves(share)):
            continue
        if reading not in taken:
            others.append((reading, share))
            continue
        changes = changes or reading_grads.Changes(inputs, lse)
        changes.add(reading, value, share)
    return changes, others


def _through_rest(
    problem: Problem, read: tuple[Reading, ...], gradients: Any, needs: Any
) -> list[Tensor | None]:
    """The same gradients by the next implementation."""
    return _through(rest, problem, read, gradients, needs)


def _through(
    other: Any, problem: Problem, read: tuple[Reading, ...], gradients: Any, needs: Any
) -> list[Tensor | None]:
    """Gradients by another implementation, which computes the call again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # One tensor may be query, key and value at once: each alias has its own gradient.
        aliases = [
            x.view_as(x) if x is not None and x.requires_grad else x for x in tensors_of(problem)
        ]
        context, values = other.attend(filled(problem, aliases), read)
        return pull([context, *pytree.tree_leaves(values)], gradients, aliases, needs, again)


ops.out_of_range, ops.through_rest = _out_of_range, _through_rest
