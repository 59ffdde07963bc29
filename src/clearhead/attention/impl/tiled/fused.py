"""torch's own fused CPU kernel, strip by strip, where it agrees with the reference.

It confuses NaN and inf, so that it only receives numbers far from overflow; its log-sum-exp of an
empty row is 0; and it takes an additive mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.impl.tiled.strips import Piece, plan, take
from clearhead.attention.problem import Problem

__all__ = ["attend", "differentiates", "gradient", "serves"]

INF = float("inf")
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Rows of a strip under a mask.
ROWS = 256
# Products and sums below this are far from overflow in float32.
SAFE = 1e30
# Scores below this are rounded by less than 2**-14.
CLOSE = 1e3
HALF = (torch.bfloat16, torch.float16)


def serves(problem: Problem) -> bool:
    """Whether the kernel computes the context: only half precision is faster there."""
    return problem.query.dtype in HALF and _agrees(problem)


def differentiates(problem: Problem, lse: Tensor | None, gradients: Sequence[Any]) -> bool:
    """Whether the kernel computes the gradient: of the context alone, with a known log-sum-exp."""
    context, *readings = gradients
    alone = all(x is None for x in readings)
    if lse is None or context is None or not alone or not _agrees(problem):
        return False
    # It recomputes the scores, and rounds them differently from the log-sum-exp.
    return _largest(context) < SAFE and _largest(lse.masked_fill(lse == -INF, 0)) < CLOSE


def _agrees(problem: Problem) -> bool:
    """Whether the kernel agrees with the reference on a call that `stream` serves."""
    query, key, value = (_largest(x) for x in (problem.query, problem.key, problem.value))
    width, source = problem.query.shape[-1], problem.key.shape[-2]
    # It masks before it scales, which turns -inf to inf. Comparisons with NaN are False.
    return (
        problem.scale > 0
        and width == problem.value.shape[-1]
        and query * key * width * max(problem.scale, 1) < SAFE
        and value * source < SAFE
    )


def _largest(x: Tensor) -> float:
    low, high = torch.aminmax(x.detach())
    return max(high.item(), -low.item(), key=_nan_last)


def _nan_last(x: float) -> float:
    return x if x == x else INF


def attend(problem: Problem) -> Tensor:
    """Return the context."""
    query, key, value = (_flat(x) for x in (problem.query, problem.key, problem.value))
    if problem.mask is None or _is_causal(problem):
        causal = problem.mask is not None
        context, _ = FORWARD(query, key, value, is_causal=causal, scale=problem.scale)
        return context.reshape(problem.query.shape)
    samples, heads, rows, width = query.shape
    # The kernel's own layout, in which the heads of a position are adjacent.
    context = query.new_zeros(samples, rows, heads, width).transpose(1, 2)
    for piece, added in _pieces(problem):
        k, v = take(key, piece.columns), take(value, piece.columns)
        strip = query[:, :, piece.rows]
        found, _ = FORWARD(strip, k, v, attn_mask=added, scale=problem.scale)
        context[:, :, piece.rows] = found
    return context.reshape(problem.query.shape)


def gradient(problem: Problem, context: Tensor, lse: Tensor, outer: Tensor) -> list[Tensor]:
    """Return the gradients of query, key and value."""
    query, key, value, context, outer = (
        _flat(x) for x in (problem.query, problem.key, problem.value, context, outer)
    )
    # Shared heads are spread out and their gradients summed; empty rows have 0 for -inf.
    key, value = (x.repeat_interleave(problem.group, 1) for x in (key, value))
    lse = lse.view(query.shape[:-1]).masked_fill(lse.view(query.shape[:-1]) == -INF, 0)
    sums = [torch.zeros_like(x, dtype=problem.dtype) for x in (query, key, value)]
    for piece, added in _pieces(problem):
        rows = (slice(None), slice(None), piece.rows)
        found = BACKWARD(
            outer[rows], query[rows], take(key, piece.columns), take(value, piece.columns),
            context[rows], lse[rows], 0.0, False, attn_mask=added, scale=problem.scale,
        )  # fmt: skip
        sums[0][rows] = found[0]
        for total, x in zip(sums[1:], found[1:], strict=True):
            _add(total, piece, x)
    for i, given in ((1, problem.key), (2, problem.value)):
        sums[i] = sums[i].unflatten(1, (-1, problem.group)).sum(2) if problem.group > 1 else sums[i]
        sums[i] = sums[i].reshape(given.shape)
    sums[0] = sums[0].reshape(problem.query.shape)
    return [x.to(problem.query.dtype) for x in sums]


def _add(total: Tensor, piece: Piece, x: Tensor) -> None:
    if isinstance(piece.columns, Tensor):
        total.index_add_(-2, piece.columns, x.to(total.dtype))
    else:
        total[:, :, piece.columns] += x


def _pieces(problem: Problem) -> Any:
    """Strips with any allowed edge, with their additive mask."""
    height = problem.query.shape[-2] if problem.mask is None else ROWS
    for piece in plan(problem, height):
        if piece.width:
            yield piece, _added(problem, piece)


def _added(problem: Problem, piece: Piece) -> Tensor | None:
    if not piece.shut:
        return None
    rows, columns = piece.positions(problem.query.device)
    allowed = problem.allowed(rows, columns)
    assert allowed is not None
    if allowed.ndim > 2:
        lead = allowed.shape[:-3] if allowed.ndim > 3 else (1,)
        allowed = allowed.expand(*lead, *allowed.shape[-3:]).flatten(0, -4)
    return torch.zeros(allowed.shape, dtype=problem.query.dtype).masked_fill_(~allowed, -INF)


def _is_causal(problem: Problem) -> bool:
    """Whether query i reads sources 0..i, for which the kernel needs no mask."""
    query, source = problem.query.shape[-2], problem.key.shape[-2]
    if query != source or problem.mask is None:
        return False
    intervals = problem.mask.intervals(query, source, problem.query.device)
    if intervals is None:
        return False
    start, stop = intervals
    return not start.any() and bool((stop == torch.arange(1, query + 1)).all())


def _flat(x: Tensor) -> Tensor:
    """(batch, head, position, width), with strides that a matrix product accepts."""
    x = x.detach()
    x = x.reshape(-1, *x.shape[-3:]) if x.ndim != 4 else x
    rows, width = x.shape[-2:]
    packed = (x.stride(-1) == 1 or width == 1) and (x.stride(-2) >= width or rows == 1)
    return x if packed else x.contiguous()
