"""torch's own fused CPU kernel, strip by strip, where it means the same as the spec.

It mixes up NaN and inf, so that it only gets tame numbers; it says 0 for the log-sum-exp of an
empty row; and it takes a mask as numbers to add.
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
TAME = 1e30
# Scores below this are rounded by less than 2**-14.
CLOSE = 1e3
HALF = (torch.bfloat16, torch.float16)


def serves(problem: Problem) -> bool:
    """Say whether the context comes from the kernel: only half precision is faster there."""
    return problem.query.dtype in HALF and _knows(problem)


def differentiates(problem: Problem, lse: Tensor | None, gradients: Sequence[Any]) -> bool:
    """Say whether the kernel gives the gradient: of the context alone, with a known log-sum-exp."""
    context, *readings = gradients
    alone = all(x is None for x in readings)
    if lse is None or context is None or not alone or not _knows(problem):
        return False
    # It takes weights from scores it computes again, rounded otherwise than the log-sum-exp.
    return _largest(context) < TAME and _largest(lse.masked_fill(lse == -INF, 0)) < CLOSE


def _knows(problem: Problem) -> bool:
    """Say whether the kernel means what the spec says, of calls that `_stream` serves."""
    query, key, value = (_largest(x) for x in (problem.query, problem.key, problem.value))
    width, source = problem.query.shape[-1], problem.key.shape[-2]
    # It masks before it scales, which turns -inf to inf. Comparisons with NaN are False.
    return (
        problem.scale > 0
        and width == problem.value.shape[-1]
        and query * key * width * max(problem.scale, 1) < TAME
        and value * source < TAME
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
    # The kernel's own layout: what follows joins the heads of a position without a copy.
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
    """Strips that read anything, with the mask as numbers to add."""
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
    """Say whether query i reads sources 0..i, which the kernel knows without a mask."""
    query, source = problem.query.shape[-2], problem.key.shape[-2]
    if query != source or problem.mask is None:
        return False
    intervals = problem.mask.intervals(query, source, problem.query.device)
    if intervals is None:
        return False
    start, stop = intervals
    return not start.any() and bool((stop == torch.arange(1, query + 1)).all())


def _flat(x: Tensor) -> Tensor:
    """(batch, head, position, width), in strides that a matrix product can take."""
    x = x.detach()
    x = x.reshape(-1, *x.shape[-3:]) if x.ndim != 4 else x
    rows, width = x.shape[-2:]
    packed = (x.stride(-1) == 1 or width == 1) and (x.stride(-2) >= width or rows == 1)
    return x if packed else x.contiguous()
