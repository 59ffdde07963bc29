"""The compiled CPU kernel: the context and what can be read on the way, in one pass.

It is chosen where it can serve; `unsupported_reasons` says where it cannot. Readings that it does
not take itself, and gradients that it does not have, come from the next implementation (`rest`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from clearhead import readings
from clearhead._impl import _kernel, _traced
from clearhead._impl.problem import Problem, watchers
from clearhead.readings import Reading

NAME = "native"
# The implementations that give what the kernel has not, in eager calls and in traced ones; the
# chooser sets them.
rest: Any = None
spec: Any = None

PLAIN = (Tensor, torch.nn.Parameter)


def state() -> str:
    """Say in a few words whether the kernel is there, and for which instruction sets."""
    if _kernel._native is None:
        return f"not there ({_kernel.MISSING})"
    return f"{_kernel._native.isa()} (of {', '.join(_kernel._native.available())})"


def unsupported_reasons(problem: Problem, read: tuple[Reading, ...]) -> list[str]:
    """Say why the kernel cannot serve the call."""
    if _kernel._native is None:
        return [f"the compiled kernel is not there: {_kernel.MISSING}"]
    tracing = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    reasons = [] if tracing else watchers()
    query, key, value = problem.query, problem.key, problem.value
    if not query.is_cpu:
        reasons.append(f"the inputs are on {query.device}, not on the CPU")
    if query.dtype not in _kernel.TYPES:
        reasons.append(f"{query.dtype} is not float32, bfloat16 or float16")
    if problem.dropout:
        reasons.append("dropout is asked for")
    if query.shape[-1] > 256 or value.shape[-1] > 256:
        reasons.append("head_dim or value_dim is above 256")
    if not (query.numel() and key.numel() and value.numel()):
        reasons.append("an axis has no elements")
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN):
        reasons.append("an input is a tensor subclass")
    if tracing and problem.bias is not None and problem.bias.requires_grad:
        reasons.append("the gradient of a bias is wanted in a traced call")
    for extra in (problem.bias, problem.sinks):
        if extra is not None and type(extra) not in PLAIN:
            reasons.append("bias or sinks are a tensor subclass")
    return reasons


def attend(problem: Problem, read: tuple[Reading, ...]) -> tuple[Tensor, list[Any]]:
    """Return the context and the values of the readings."""
    if torch.compiler.is_compiling():
        return _traced.attend(problem, read, spec)
    try:
        if not (torch.is_grad_enabled() and _requires_grad(problem)):
            if not read and problem.query.ndim == 4:
                return _kernel.context(problem), []
            return _forward(problem, read)[:2]
        specs: list[Any] = []
        context, *flat = _Native.apply(problem, read, specs, *_inputs(problem))  # type: ignore[misc]
        return context, pytree.tree_unflatten(flat, specs[0]) if read else []
    except _kernel.OutOfRange:
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
        ours, good = _kernel.in_range(problem)
    return torch.where(good, ours, context), values


def _requires_grad(problem: Problem) -> bool:
    if problem.query.requires_grad or problem.key.requires_grad or problem.value.requires_grad:
        return True
    return any(x is not None and x.requires_grad for x in (problem.bias, problem.sinks))


def _inputs(problem: Problem) -> tuple[Tensor | None, ...]:
    return problem.query, problem.key, problem.value, problem.bias, problem.sinks


def _forward(
    problem: Problem, read: tuple[Reading, ...], graph: bool = False
) -> tuple[Any, list[Any], Any]:
    taken = _kernel.native_readings(problem, read) if read else ()
    inputs = _kernel.Inputs(problem)
    out, results = _kernel.forward(inputs, taken, graph)
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
    """The kernel's own backward; what it lacks is differentiated through the next."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, read: tuple[Reading, ...], specs: list, *inputs: Any):
        context, values, results = _forward(problem, read, graph=True)
        flat, spec = pytree.tree_flatten(values) if read else ((), None)
        specs.append(spec)
        ctx.problem, ctx.read, ctx.spec = replace(problem, **dict.fromkeys(FIELDS)), read, spec
        ctx.save_for_backward(*inputs, context, results.lse, results.softmax)
        ctx.set_materialize_grads(False)
        return context, *(x.view_as(x) for x in flat)

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        outer, *flat = gradients
        *inputs, context, lse, softmax = ctx.saved_tensors
        problem = replace(ctx.problem, **dict(zip(FIELDS, inputs, strict=True)))
        needs = ctx.needs_input_grad[3:]
        grad_lse, known = _of_lse(ctx.read, flat, ctx.spec)
        if torch.is_grad_enabled() or not known or needs[3]:
            return None, None, None, *_through_rest(problem, ctx.read, gradients, needs)
        out = _kernel.four(context)
        grad = torch.zeros_like(out) if outer is None else _kernel.four(outer)
        handed = _kernel.Inputs(problem)
        given = _kernel.backward(handed, out, softmax, grad, grad_lse)
        found = [
            g.reshape(x.shape).to(x.dtype) if need else None
            for x, g, need in zip(inputs, given, needs, strict=False)
        ]
        sinks = _kernel.sink_gradient(problem, out, lse, grad, grad_lse) if needs[4] else None
        return None, None, None, *found, None, sinks


FIELDS = ("query", "key", "value", "bias", "sinks")


def _of_lse(read: tuple[Reading, ...], flat: Any, spec: Any) -> tuple[Tensor | None, bool]:
    """The gradient of the log-sum-exp, which the kernel takes, and whether it is the only one."""
    total, known = None, True
    for reading, share in zip(read, pytree.tree_unflatten(flat, spec) if read else (), strict=True):
        given = [x for x in pytree.tree_leaves(share) if x is not None]
        if given and type(reading) is readings.LogSumExp:
            total = given[0] if total is None else total + given[0]
        elif given:
            known = False
    return total, known


def _through_rest(
    problem: Problem, read: tuple[Reading, ...], gradients: Any, needs: Any
) -> list[Tensor | None]:
    """The same gradients by the next implementation, which computes the call again."""
    again_differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        # One tensor may be query, key and value at once: each alias has its own gradient.
        aliases = [
            None if x is None else x.view_as(x) if x.requires_grad else x for x in _inputs(problem)
        ]
        again = replace(problem, **dict(zip(FIELDS, aliases, strict=True)))
        context, values = rest.attend(again, read)
        outputs = [context, *pytree.tree_leaves(values)]
        pairs = [
            (x, g)
            for x, g in zip(outputs, gradients, strict=True)
            if g is not None and x.requires_grad
        ]
        wanted: Any = [x for x, need in zip(aliases, needs, strict=True) if need]
        if not pairs:
            return [None] * len(aliases)
        ends, starts = zip(*pairs, strict=True)
        found = iter(
            torch.autograd.grad(
                ends, wanted, starts, create_graph=again_differentiable, allow_unused=True
            )
        )
    return [next(found) if need else None for need in needs]
