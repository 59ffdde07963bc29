"""torch's own fused CPU kernel, strip by strip, where it means the same as the spec.

It gives the log-sum-exp too, but it mixes up NaN and inf, so that it only gets tame numbers; it
says 0 for the log-sum-exp of an empty row; and it takes a mask as numbers to add.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead._impl._strips import Piece, plan, take
from clearhead._impl.problem import Problem

__all__ = ["attend", "gradient", "serves"]

INF = float("inf")
# Rows of a strip under a mask, and elements that a mask may have there.
ROWS, ELEMENTS = 256, 1 << 22
# Products and sums below this are far from overflow in float32.
TAME = 1e30
# The kernel computes with these dtypes on every CPU.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def serves(problem: Problem) -> bool:
    """Say whether the kernel gives what the spec says."""
    query, key, value = problem.query, problem.key, problem.value
    return (
        query.device.type == "cpu"
        and problem.bias is None
        and problem.softcap is None
        and problem.sinks is None
        and problem.seed is None
        and query.shape[-1] == value.shape[-1]
        and query.dtype in DTYPES
        and min(query.numel(), key.numel()) > 0
        and _tame(problem)
    )


def _tame(problem: Problem) -> bool:
    query, key, value = (_largest(x) for x in (problem.query, problem.key, problem.value))
    width, source = problem.query.shape[-1], problem.key.shape[-2]
    # Comparisons with NaN are False.
    return query * key * width * max(abs(problem.scale), 1) < TAME and value * source < TAME


def _largest(x: Tensor) -> float:
    low, high = torch.aminmax(x.detach())
    return max(high.item(), -low.item(), key=_nan_last)


def _nan_last(x: float) -> float:
    return x if x == x else INF


def attend(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return context and log-sum-exp, (*batch, head, query)."""
    query, key, value = (_flat(x) for x in (problem.query, problem.key, problem.value))
    samples, heads, rows, width = query.shape
    # The kernel's own layout: what follows joins the heads of a position without a copy.
    context = query.new_zeros(samples, rows, heads, width).transpose(1, 2)
    lse = torch.full((samples, heads, rows), -INF, dtype=problem.dtype)
    for piece, added, empty in _pieces(problem):
        k, v = take(key, piece.columns), take(value, piece.columns)
        found, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, :, piece.rows], k, v, attn_mask=added, scale=problem.scale
        )
        if empty is not None:
            total = total.masked_fill(empty, -INF)
        context[:, :, piece.rows], lse[:, :, piece.rows] = found, total
    lead = problem.query.shape[:-2]
    return context.reshape(problem.query.shape), lse.view(*lead, rows)


def gradient(problem: Problem, context: Tensor, lse: Tensor, outer: Tensor) -> list[Tensor]:
    """Return the gradients of query, key and value."""
    query, key, value, context, outer = (
        _flat(x) for x in (problem.query, problem.key, problem.value, context, outer)
    )
    # The kernel knows no shared heads backwards, and 0 for the log-sum-exp of an empty row.
    key, value = (x.repeat_interleave(problem.group, 1) for x in (key, value))
    lse = lse.view(query.shape[:-1]).masked_fill(lse.view(query.shape[:-1]) == -INF, 0)
    sums = [torch.zeros_like(x, dtype=problem.dtype) for x in (query, key, value)]
    for piece, added, _ in _pieces(problem):
        rows = (slice(None), slice(None), piece.rows)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
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
    """Strips with the mask as numbers to add and the rows that it leaves empty."""
    height = problem.query.shape[-2] if problem.mask is None else ROWS
    for piece in plan(problem, height):
        if piece.width:
            yield piece, *_added(problem, piece)


def _added(problem: Problem, piece: Piece) -> tuple[Tensor | None, Tensor | None]:
    if not piece.shut:
        return None, None
    rows, columns = piece.positions(problem.query.device)
    allowed = problem.allowed(rows, columns)
    assert allowed is not None
    if allowed.ndim > 2:
        lead = allowed.shape[:-3] if allowed.ndim > 3 else (1,)
        allowed = allowed.expand(*lead, *allowed.shape[-3:]).flatten(0, -4)
    added = torch.zeros(allowed.shape, dtype=problem.query.dtype).masked_fill_(~allowed, -INF)
    return added, ~allowed.any(-1)


def _flat(x: Tensor) -> Tensor:
    """(batch, head, position, width), in strides that a matrix product can take."""
    x = x.detach()
    x = x.reshape(-1, *x.shape[-3:]) if x.ndim != 4 else x
    rows, width = x.shape[-2:]
    packed = (x.stride(-1) == 1 or width == 1) and (x.stride(-2) >= width or rows == 1)
    return x if packed else x.contiguous()
