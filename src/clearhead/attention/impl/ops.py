"""A traced call as one operator, `clearhead::attend`, that torch.compile keeps whole in its graph.

Here are its schema, its fake and its autograd registration: torch only. What computes it on the
tensors of a device is registered by `register("cpu", kernels)`; a GPU implementation adds a line
`register("cuda", kernels)` beside it, in `impl/__init__.py`, and nothing here changes.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead.attention.impl.layout import as_4d, bias_as_4d
from clearhead.attention.problem import Problem
from clearhead.masks import Mask, Ranges, dense, from_ranges
from clearhead.readings import LogSumExp, Reading

__all__ = ["Kernels", "attend", "register"]


class Kernels(Protocol):
    """What an implementation registers for a device. All tensors have four axes."""

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        """Return the context, the log-sum-exp, and a (2, *rows) tensor for the backward."""
        ...

    def backward(
        self, problem: Problem, saved: tuple[Tensor, Tensor, Tensor], grad: Tensor,
        grad_lse: Tensor, needs: list[bool],
    ) -> list[Tensor | None]:  # fmt: skip
        """Return the gradients of query, key, value, and of bias and sinks where `needs` says."""
        ...


def register(device: str, kernels: Kernels) -> None:
    """Register what computes the operator on tensors of a device."""

    def forward(*call: Any) -> Any:
        return kernels.forward(_problem(*call))

    def backward(
        grad: Tensor, grad_lse: Tensor, context: Tensor, lse: Tensor, softmax: Tensor, *given: Any
    ) -> Any:  # fmt: skip
        saved, (*call, needs) = (context, lse, softmax), given
        found = kernels.backward(_problem(*call), saved, grad, grad_lse, needs)
        return tuple(lse.new_empty(0) if x is None else x.contiguous() for x in found)

    _attend.register_kernel(device)(forward)
    _backward.register_kernel(device)(backward)


def attend(problem: Problem, read: tuple[Reading, ...], reference: Any) -> tuple[Tensor, list[Any]]:
    """Trace the call: one operator for the context, and the plain operations of `reference`.

    The operator also returns the log-sum-exp; the reference computes the other readings.
    """
    query, shape = as_4d(problem.query), problem.query.shape
    start, stop, edges = _edges(problem)
    bias = None if problem.bias is None else bias_as_4d(problem.bias, problem)
    context, lse, _ = torch.ops.clearhead.attend(
        query, as_4d(problem.key), as_4d(problem.value), start, stop, edges, bias, problem.sinks,
        problem.scale, problem.softcap, problem.seed, problem.dropout,
    )  # fmt: skip
    others = tuple(r for r in read if type(r) is not LogSumExp)
    values = reference.attend(problem, others)[1] if others else []
    found = dict(zip(others, values, strict=True))
    values = [found[r] if r in found else lse.reshape(shape[:-1]) for r in read]
    return context.reshape(*shape[:-1], context.shape[-1]), values


def _edges(problem: Problem) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The mask as start and stop of one interval a row where it is one, else a bool an edge."""
    if problem.mask is None:
        return None, None, None
    sizes, device = problem.sizes, problem.query.device
    found = problem.mask.intervals(sizes.query, sizes.source, device)
    if found is not None:
        start, stop = (x if x.ndim == 3 else x[None, None] for x in found)
        return start.to(torch.int32), stop.to(torch.int32), None
    rows, columns = (torch.arange(n, device=device) for n in (sizes.query, sizes.source))
    edges = problem.mask.tile(rows, columns, sizes)
    return None, None, edges if edges.ndim == 4 else edges[None, None]


def _problem(
    query: Tensor, key: Tensor, value: Tensor, start: Tensor | None, stop: Tensor | None,
    edges: Tensor | None, bias: Tensor | None, sinks: Tensor | None, scale: float,
    softcap: float | None, seed: Tensor | None, dropout: float,
) -> Problem:  # fmt: skip
    """The problem of an operator call."""
    mask: Mask | None = None
    if start is not None and stop is not None:
        mask = from_ranges(Ranges(start[None].contiguous(), stop[None].contiguous()))
    elif edges is not None:
        mask = dense(edges)
    return Problem(query, key, value, mask, scale, bias, softcap, sinks, dropout, seed)


# The signature is the schema; `register` adds what computes it.
@torch.library.custom_op("clearhead::attend", mutates_args=(), device_types=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, start: Tensor | None, stop: Tensor | None,
    edges: Tensor | None, bias: Tensor | None, sinks: Tensor | None, scale: float,
    softcap: float | None, seed: Tensor | None, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    raise NotImplementedError


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    lead = query.shape[:3]
    lse = query.new_empty(lead, dtype=torch.float32)
    return query.new_empty(*lead, value.shape[3]), lse, lse.new_empty(2, *lead)


@torch.library.custom_op("clearhead::attend_backward", mutates_args=(), device_types=())
def _backward(
    grad: Tensor, grad_lse: Tensor, context: Tensor, lse: Tensor, softmax: Tensor, query: Tensor,
    key: Tensor, value: Tensor, start: Tensor | None, stop: Tensor | None, edges: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, scale: float, softcap: float | None,
    seed: Tensor | None, dropout: float, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    raise NotImplementedError


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
