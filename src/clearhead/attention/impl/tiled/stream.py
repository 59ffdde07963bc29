"""Attention in one pass over strips that stay in the cache: context, log-sum-exp and readings.

Scores are turned to base 2 in the pass that subtracts each row's largest, so that exp2, three times
as fast as exp, makes weights of them. The weights mix the values before a reading sees them, so
that looking changes nothing, and a row's bits depend only on what the row may read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import log, prod
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.impl.tiled.gather import gatherers
from clearhead.attention.impl.tiled.strips import Piece, plan, take
from clearhead.attention.impl.tiled.view import View, tiles_of
from clearhead.attention.problem import Problem
from clearhead.readings import Reading

__all__ = ["attend", "serves"]

LOG2E, LN2 = 1 / log(2), log(2)
INF = float("inf")
# Rows of a strip, and elements in a buffer: what the second-level cache holds.
ROWS, ELEMENTS = 128, 1 << 19
# Edges of masks that are kept for all strips at once.
KEPT = 1 << 22
# Values below LIGHT do not overflow in a sum.
LIGHT = 1e30
# Scores above this are rounded by more than 2**-8.
LARGE = float(1 << 16)


def serves(problem: Problem) -> bool:
    """Whether this pass computes the call."""
    return (
        problem.query.device.type == "cpu"
        and problem.bias is None
        and problem.softcap is None
        and problem.sinks is None
        and problem.seed is None
        # False where the scale is NaN.
        and abs(problem.scale) < LIGHT
        and min(problem.query.numel(), problem.key.numel(), problem.value.numel()) > 0
    )


def attend(
    problem: Problem, read: tuple[Reading, ...], mix: bool = True
) -> tuple[Tensor | None, Tensor, list[Any]]:
    """Context where it is to `mix`, log-sum-exp, and parts: None for readings not gathered here."""
    query, dtype = problem.query, problem.dtype
    lead, rows = query.shape[:-2], query.shape[-2]
    # Rows that no strip holds may read nothing: their sum is 0.
    total = torch.zeros(prod(lead), rows, dtype=dtype)
    shift = torch.zeros_like(total)
    # Without a mask every row is written.
    make = torch.empty if problem.mask is None else torch.zeros
    context = make(prod(lead), rows, problem.value.shape[-1] if mix else 0, dtype=dtype)
    height = _height(problem)
    found = gatherers(problem, read, height)
    busy = [each for each in found if each and each.needs_weights]
    values = _Values(problem.value.flatten(0, -3).to(dtype))
    for view in _views(problem, height, any(each.needs_logs for each in busy), total, shift):
        if mix:
            values.mix(view, context[view.leads, view.piece.rows])
        if busy:
            view.normalize()
        for each in busy:
            each.see(view)
    lse = torch.where(shift == INF, INF, total.log2().add_(shift).mul_(LN2))
    lse, positions = lse.view(*lead, rows), torch.arange(rows)
    parts: list[Any] = [each and each.part(positions, lse) for each in found]
    mixed = context.view(*lead, rows, -1).to(query.dtype) if mix else None
    return mixed, lse, parts


class _Values:
    """What the weights mix. Values that are huge, inf or NaN have a product of their own.

    In the common product they would reach rows that may not read them, as 0 * inf, or overflow.
    """

    def __init__(self, value: Tensor):
        low, high = torch.aminmax(value)
        self.value, self.unsafe = value, None
        if not max(high.item(), -low.item(), key=_nan_last) < LIGHT:
            unsafe = ~(value.abs() < LIGHT)
            self.value, self.unsafe = value.masked_fill(unsafe, 0), value.masked_fill(~unsafe, 0)

    def mix(self, view: View, out: Tensor) -> None:
        """Write the weights' mixture of the values, (lead, rows, value_dim)."""
        mixed = self._product(view, view.weights, self.value)
        torch.div(mixed, view.total.unsqueeze(-1), out=out)
        if self.unsafe is not None:
            self._mix_unsafe(view, self.unsafe, out)

    def _mix_unsafe(self, view: View, values: Tensor, out: Tensor) -> None:
        finite = values.isfinite()
        huge, non_finite = values.masked_fill(~finite, 0), values.masked_fill(finite, 0)
        weights = view.weights / view.total.unsqueeze(-1)
        weights.masked_fill_(~view.allowed, 0)
        out += self._product(view, weights, huge)
        edges = view.allowed.to(out.dtype)
        for sign in (INF, -INF):
            met = (non_finite.isnan() | (non_finite == sign)).to(out.dtype)
            out += torch.where(self._product(view, edges, met) > 0, sign, 0.0)

    @staticmethod
    def _product(view: View, weights: Tensor, value: Tensor) -> Tensor:
        leads, rows, width = weights.shape
        group = view.problem.group
        sources = slice(view.leads.start // group, view.leads.stop // group)
        folded = weights.view(-1, group * rows, width)
        mixed = torch.bmm(folded, take(value[sources], view.piece.columns))
        return mixed.view(leads, rows, -1)


def _nan_last(x: float) -> float:
    return x if x == x else INF


def _views(
    problem: Problem, height: int, logs_too: bool, totals: Tensor, shifts: Tensor
) -> Iterator[View]:
    """Compute strip after strip; a view is valid until the next one comes.

    The two tensors receive what each row's weights sum to and what was subtracted before.
    """
    group, dtype = problem.group, problem.dtype
    query, scale = problem.query.flatten(0, -3), problem.scale
    key = problem.key.flatten(0, -3).to(dtype)
    factor = LOG2E * (scale if scale > 0 else 1)
    bounded = _bounded(problem)
    room = [Buffer(dtype), Buffer(dtype)]
    for piece, shut, sources in _jobs(problem, height):
        rows = piece.rows.stop - piece.rows.start
        leads = slice(sources.start * group, sources.stop * group)
        shape = (sources.stop - sources.start, group * rows, piece.width)
        logs = room[0].take(shape)
        lines = query[leads, piece.rows].to(dtype).reshape(*shape[:2], -1)
        torch.bmm(lines, take(key[sources], piece.columns).mT, out=logs)
        if scale <= 0:  # where -inf would not stay -inf
            logs.mul_(scale)
        logs = logs.view(-1, rows, piece.width)
        blocked = [(side, tiles[which[leads]]) for side, tiles, which in shut]
        for side, closed in blocked:
            logs[..., side].masked_fill_(closed, -INF)
        # Where nothing is blocked and nothing overflows, no row is empty.
        empty = bool(blocked) or not bounded
        shift = shifts[leads, piece.rows]
        _lower(logs, factor, shift, empty, bounded)
        weights = room[1].take(logs.shape) if logs_too else logs
        torch.exp2(logs, out=weights)
        if logs_too:
            for side, closed in blocked:
                logs[..., side].masked_fill_(closed, 0)
        total = totals[leads, piece.rows]
        torch.sum(weights, -1, out=total)
        if empty:
            total = total.masked_fill(total == 0, 1)
        yield View(problem, piece, leads, weights, logs, total, shift, blocked)


def _bounded(problem: Problem) -> bool:
    """Whether no score can be LARGE, blocked ones included."""
    size = abs(problem.scale) * problem.query.shape[-1]
    for x in (problem.query, problem.key):
        low, high = torch.aminmax(x.detach())
        size *= max(high.item(), -low.item(), key=_nan_last)
    # False where the bound is NaN.
    return size * LOG2E < LARGE


def _height(problem: Problem) -> int:
    """How many rows a strip has."""
    row = problem.group * problem.key.shape[-2]
    height = min(max(ELEMENTS // row, 16), ROWS)
    # Twice the rows are half the calls, but under a mask more of what they compute is blocked.
    return height if problem.mask is not None else height * max(_threads(), 2)


def _threads() -> int:
    """How many second-level caches there are to fill; many strips beat a few huge ones."""
    return min(torch.get_num_threads(), 4)


def _elements() -> int:
    """How many elements a buffer has. With several threads, long operations matter more."""
    threads = _threads()
    return ELEMENTS * threads * (2 if threads > 1 else 1)


def _lower(logs: Tensor, factor: float, top: Tensor, empty: bool, bounded: bool) -> None:
    """Scale and subtract each row's largest score, in place; write to `top` what was subtracted.

    This is one multiply-add, in which large scores are not rounded themselves.
    """
    torch.amax(logs, -1, out=top)
    top.mul_(factor)
    if empty:
        top.masked_fill_(top == -INF, 0)
    torch.add(top.neg().unsqueeze(-1), logs, alpha=factor, out=logs)
    if bounded:
        return
    large = top.abs() > LARGE
    if large.any():
        # The rounding of a large score is itself large: subtract again, so that the largest is 0.
        rounding = torch.where(large & top.isfinite(), logs.amax(-1), 0)
        logs.sub_(rounding.unsqueeze(-1))
        top += rounding


def _jobs(problem: Problem, height: int) -> Iterator[tuple[Piece, list[Any], slice]]:
    """Strips with their blocked edges, and the source leads that are computed together.

    All strips of a head come together, because its keys then stay in the cache, unless the blocked
    edges of all strips are too many to keep.
    """
    leads, held = prod(problem.key.shape[:-2]), height * problem.group
    threads = _threads()
    pieces = [piece for piece in plan(problem, height) if piece.width]
    # The mask may differ between all samples and heads.
    tiles = prod(problem.query.shape[:-2]) if problem.mask is not None else 1
    edges = sum((piece.rows.stop - piece.rows.start) * piece.shut_width for piece in pieces)

    def step(piece: Piece) -> int:
        """How many source leads a buffer holds; narrow strips have several heads."""
        size = round(_elements() / (held * piece.width))
        # Each thread multiplies the matrices of whole heads.
        return max(1, size - size % threads if size > threads else size)

    for size, alike in groupby(pieces, step):
        chunks = [slice(at, min(at + size, leads)) for at in range(0, leads, size)]
        if edges * tiles <= KEPT:
            ready = [(piece, _shut(problem, piece)) for piece in alike]
            yield from ((*each, chunk) for chunk in chunks for each in ready)
        else:
            each_once = ((piece, _shut(problem, piece)) for piece in alike)
            yield from ((*each, chunk) for each in each_once for chunk in chunks)


def _shut(problem: Problem, piece: Piece) -> list[tuple[slice, Tensor, Tensor]]:
    """Columns of the piece, their blocked edges, and which tile each lead has."""
    if not piece.shut:
        return []
    rows, columns = piece.positions(problem.query.device)
    found = ((side, *tiles_of(problem, rows, columns[side])) for side in piece.shut)
    return [(side, _closed(tiles), which) for side, tiles, which in found]


def _closed(tiles: Tensor) -> Tensor:
    """The edges that are not in the tiles; equal rows take the memory of one."""
    return (~tiles[:, :1]).expand(tiles.shape) if tiles.stride(1) == 0 else ~tiles


class Buffer:
    """Memory that grows to the largest strip and is reused."""

    def __init__(self, dtype: torch.dtype):
        self.held = torch.empty(0, dtype=dtype)

    def take(self, shape: tuple[int, ...]) -> Tensor:
        size = prod(shape)
        if len(self.held) < size:
            self.held = torch.empty(size, dtype=self.held.dtype)
        return self.held[:size].view(shape)
