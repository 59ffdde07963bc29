"""The compiled kernel as an operator that torch.compile keeps whole in its graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.impl.autograd import filled, tensors_of
from clearhead.attention.impl.native import backward, kernel
from clearhead.attention.impl.native.reading_grads import Changes
from clearhead.attention.problem import Problem
from clearhead.masks import Mask, Ranges, dense, from_ranges
from clearhead.readings import LogSumExp, Reading

# What serves numbers that are out of the kernel's range, as in eager calls; `native` sets them.
out_of_range: Any = None
through_rest: Any = None


def attend(problem: Problem, read: tuple[Reading, ...], spec: Any) -> tuple[Tensor, list[Any]]:
    """Trace the call: one operator for the context, plain operations (`spec`) for the readings."""
    query, shape = _four(problem.query), problem.query.shape
    start, stop, edges = _edges(problem)
    bias = None if problem.bias is None else kernel.lifted(problem.bias, problem)
    context, lse, _ = torch.ops.clearhead.attend(
        query, _four(problem.key), _four(problem.value), start, stop, edges, bias, problem.sinks,
        problem.scale, problem.softcap, problem.seed, problem.dropout,
    )  # fmt: skip
    others = tuple(r for r in read if type(r) is not LogSumExp)
    found = dict(zip(others, spec.attend(problem, others)[1], strict=True)) if others else {}
    values = [found[r] if r in found else lse.reshape(shape[:-1]) for r in read]
    return context.reshape(*shape[:-1], context.shape[-1]), values


def _four(x: Tensor) -> Tensor:
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def _edges(problem: Problem) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The mask as two numbers a row where it can be, else a bool for each edge."""
    if problem.mask is None:
        return None, None, None
    sizes = problem.sizes
    found = problem.mask.intervals(sizes.query, sizes.source)
    if found is not None:
        start, stop = (x if x.ndim == 3 else x[None, None] for x in found)
        return start.to(torch.int32), stop.to(torch.int32), None
    rows, columns = torch.arange(sizes.query), torch.arange(sizes.source)
    edges = problem.mask.tile(rows, columns, sizes)
    return None, None, edges if edges.ndim == 4 else edges[None, None]


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, start: Any, stop: Any, edges: Any, bias: Any, sinks: Any,
    scale: float, softcap: float | None, seed: Tensor | None, dropout: float,
) -> kernel.Inputs:  # fmt: skip
    ranges = None
    if start is not None:
        ranges = Ranges(*(x[None].contiguous() for x in (start, stop)))
    problem = Problem(q, k, v, None, scale, bias, softcap, sinks, dropout, seed)
    return kernel.Inputs(problem, ranges, edges)


def _beyond(inputs: kernel.Inputs) -> Problem:
    """The problem for the next implementation, with its mask."""
    mask: Mask | None = None
    if inputs.ranges is not None:
        mask = from_ranges(inputs.ranges)
    elif inputs.edges is not None:
        mask = dense(inputs.edges)
    return replace(inputs.problem, mask=mask)


@torch.library.custom_op("clearhead::attend", mutates_args=(), device_types="cpu")
def _attend(
    query: Tensor, key: Tensor, value: Tensor, start: Tensor | None, stop: Tensor | None,
    edges: Tensor | None, bias: Tensor | None, sinks: Tensor | None, scale: float,
    softcap: float | None, seed: Tensor | None, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = _inputs(
        query, key, value, start, stop, edges, bias, sinks, scale, softcap, seed, dropout
    )
    try:
        context, results = kernel.forward(inputs, graph=True)
    except kernel.OutOfRange:
        context, (lse,) = out_of_range(_beyond(inputs), (LogSumExp(),))
        # This is how the backward knows.
        return context, lse, lse.new_full((2, *lse.shape), torch.nan)
    return context, results.lse, results.softmax  # type: ignore[union-attr]


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lead = query.shape[:3]
    lse = query.new_empty(lead, dtype=torch.float32)
    return query.new_empty(*lead, value.shape[3]), lse, lse.new_empty(2, *lead)


@torch.library.custom_op("clearhead::attend_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor, grad_lse: Tensor, context: Tensor, lse: Tensor, softmax: Tensor, query: Tensor,
    key: Tensor, value: Tensor, start: Tensor | None, stop: Tensor | None, edges: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, scale: float, softcap: float | None,
    seed: Tensor | None, dropout: float, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = _inputs(
        query, key, value, start, stop, edges, bias, sinks, scale, softcap, seed, dropout
    )
    if softmax.isnan().all():
        found: Any = _through_rest(_beyond(inputs), [grad, grad_lse], needs)
    else:
        changes = Changes(inputs, lse)
        changes.add(LogSumExp(), None, grad_lse)
        out, softmax, wanted = kernel.four(context), softmax.contiguous(), (True,) * 3 + (*needs,)
        found = backward.backward(inputs, out, lse, softmax, grad, changes, wanted)
    return tuple(lse.new_empty(0) if x is None else x.contiguous() for x in found)  # type: ignore[return-value]


@_backward.register_fake
def _(grad: Tensor, grad_lse: Tensor, context: Tensor, lse: Tensor, softmax: Tensor,
      query: Tensor, key: Tensor, value: Tensor, start: Tensor | None, stop: Tensor | None,
      edges: Tensor | None, bias: Tensor | None, sinks: Tensor | None, scale: float,
      softcap: float | None, seed: Tensor | None, dropout: float,
      needs: list[bool]) -> Any:  # fmt: skip
    extra = (x if need else None for x, need in zip((bias, sinks), needs, strict=True))
    return tuple(
        lse.new_empty(0)
        if x is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (query, key, value, *extra)
    )


def _through_rest(problem: Problem, gradients: list[Tensor], needs: list[bool]) -> list[Any]:
    """The gradients by the next implementation, in a thread: an operator's own has no autograd."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors_of(problem)]
    wanted = (True,) * 3 + (*needs,)

    def work() -> list[Any]:
        with torch.no_grad():
            return through_rest(filled(problem, leaves), (LogSumExp(),), gradients, wanted)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.softcap, seed, ctx.dropout = inputs
    ctx.save_for_backward(*tensors, seed, *output)


def _differentiate(ctx: Any, grad: Tensor, grad_lse: Tensor, _: Any) -> Any:
    *tensors, seed, context, lse, softmax = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[6:8])
    *found, bias, sinks = torch.ops.clearhead.attend_backward(
        grad, grad_lse, context, lse, softmax, *tensors, ctx.scale, ctx.softcap, seed,
        ctx.dropout, needs,
    )  # fmt: skip
    extra = (x if need else None for x, need in zip((bias, sinks), needs, strict=True))
    return *found, None, None, None, *extra, None, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)
