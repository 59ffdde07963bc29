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

NOT_BUILT = "no C++ compiler was found when clearhead was installed"
PLAIN = (Tensor, torch.nn.Parameter)


def state() -> str:
    """Say in a few words whether the kernel is there, and for which instruction sets."""
    if _kernel._native is None:
        return f"not there ({NOT_BUILT})"
    return f"{_kernel._native.isa()} (of {', '.join(_kernel._native.available())})"


def unsupported_reasons(problem: Problem, read: tuple[Reading, ...]) -> list[str]:
    """Say why the kernel cannot serve the call."""
    if _kernel._native is None:
        return [f"the compiled kernel is not there: {NOT_BUILT}"]
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
    if not (torch.is_grad_enabled() and _requires_grad(problem)):
        if not read and problem.query.ndim == 4:
            return _kernel.context(problem), []
        return _forward(problem, read)[:2]
    specs: list[Any] = []
    context, *flat = _Native.apply(problem, read, specs, *_inputs(problem))  # type: ignore[misc]
    return context, pytree.tree_unflatten(flat, specs[0]) if read else []


def _requires_grad(problem: Problem) -> bool:
    if problem.query.requires_grad or problem.key.requires_grad or problem.value.requires_grad:
        return True
    return any(x is not None and x.requires_grad for x in (problem.bias, problem.sinks))


def _inputs(problem: Problem) -> tuple[Tensor | None, ...]:
    return problem.query, problem.key, problem.value, problem.bias, problem.sinks


def _forward(problem: Problem, read: tuple[Reading, ...], lse: bool = False) -> tuple[Any, list[Any], Any, Any]:
    taken = _kernel.native_readings(problem, read) if read else ()
    inputs = _kernel.Inputs(problem)
    out, results = _kernel.forward(inputs, taken, lse)
    shape = problem.query.shape
    context = out if len(shape) == 4 else out.reshape(*shape[:-1], out.shape[-1])
    if not read:
        return context, [], results, inputs
    others = tuple(reading for reading in read if reading not in taken)
    found = dict(zip(others, rest.readings_only(problem, others), strict=True)) if others else {}
    for reading in taken:
        found[reading] = _batched(results.value(reading), shape)
    return context, [found[reading] for reading in read], results, inputs


def _batched(value: Any, shape: tuple[int, ...]) -> Any:
    if len(shape) == 4:
        return value
    if isinstance(value, tuple):
        return type(value)(*(_batched(x, shape) for x in value))
    return value.reshape(*shape[:-3], *value.shape[1:])


class _Native(torch.autograd.Function):
    """The kernel's own backward; what it lacks is differentiated through the next implementation."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, read: tuple[Reading, ...], specs: list, *inputs: Any):
        context, values, results, handed = _forward(problem, read, lse=True)
        flat, spec = pytree.tree_flatten(values) if read else ((), None)
        specs.append(spec)
        ctx.problem, ctx.read, ctx.spec = replace(problem, **dict.fromkeys(FIELDS)), read, spec
        ctx.ranges = handed.ranges
        ctx.save_for_backward(*inputs, context, results.lse)
        ctx.set_materialize_grads(False)
        return context, *(x.view_as(x) for x in flat)

    @staticmethod
    def backward(ctx: Any, outer: Tensor | None, *flat: Any):
        *inputs, context, lse = ctx.saved_tensors
        problem = replace(ctx.problem, **dict(zip(FIELDS, inputs, strict=True)))
        needs = ctx.needs_input_grad[3:]
        shares = pytree.tree_unflatten(flat, ctx.spec) if flat else []
        terms = _Terms(ctx.read, shares, problem)
        if torch.is_grad_enabled() or not terms.known or needs[3]:
            return None, None, None, *_through_rest(problem, ctx.read, (outer, *flat), needs)
        if outer is None:
            outer = torch.zeros_like(context)
        found = terms.gradient(problem, ctx.ranges, outer, context, lse, needs)
        return None, None, None, *found


FIELDS = ("query", "key", "value", "bias", "sinks")


class _Terms:
    """The gradients of readings that fold into the kernel's: log-sum-exp and entropy."""

    def __init__(self, read: tuple[Reading, ...], shares: list[Any], problem: Problem):
        self.lse: Tensor | None = None
        self.entropy: Tensor | None = None
        self.known = True
        for reading, share in zip(read, shares, strict=True):
            given = [x for x in pytree.tree_leaves(share) if x is not None]
            if not given:
                continue
            if type(reading) is readings.LogSumExp:
                self.lse = share if self.lse is None else self.lse + share
            else:
                self.known = False

    def gradient(
        self, problem: Problem, ranges: Any, outer: Tensor, context: Tensor, lse: Tensor, needs: Any
    ) -> list[Tensor | None]:
        """Gradients of query, key, value, bias (None) and sinks."""
        with torch.no_grad():
            inputs = _kernel.Inputs(problem)
            shift = None if self.lse is None else (-self.lse.float()).reshape(lse.shape).contiguous()
            out, grad = _kernel.four(context), _kernel.four(outer)
            found: list[Tensor | None] = []
            given = _kernel.backward(inputs, out, lse, grad, shift, None)
            for x, g, need in zip((problem.query, problem.key, problem.value), given, needs, strict=False):
                found.append(g.reshape(x.shape).to(x.dtype) if need else None)
            sinks = None
            if needs[4]:
                delta = (out.float() * grad.float()).sum(-1)
                delta = delta if shift is None else delta + shift
                weight = (problem.sinks.float()[:, None] - lse).exp()
                # an empty row with a sink at -inf has no weight to give
                weight = torch.where(weight.isfinite(), weight, 0)
                sinks = (-(weight * delta).sum((0, 2))).to(problem.sinks.dtype)
        return [*found, None, sinks]


def _through_rest(
    problem: Problem, read: tuple[Reading, ...], gradients: Any, needs: Any
) -> list[Tensor | None]:
    """The same gradients by the next implementation, which computes the call again."""
    again_differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        # One tensor may be query, key and value at once: each alias has its own gradient.
        aliases = [None if x is None else x.view_as(x) if x.requires_grad else x for x in _inputs(problem)]
        again = replace(problem, **dict(zip(FIELDS, aliases, strict=True)))
        context, values = rest.attend(again, read)
        outputs = [context, *pytree.tree_leaves(values)]
        pairs = [(x, g) for x, g in zip(outputs, gradients, strict=True) if g is not None and x.requires_grad]
        wanted = [x for x, need in zip(aliases, needs, strict=True) if need]
        ends, starts = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ends, wanted, starts, create_graph=again_differentiable, allow_unused=True))
    return [next(found) if need else None for need in needs]
