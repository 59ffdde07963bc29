"""Readings from a second pass over the scores, once the log-sum-exp of each row is known.

Scores come in base 2 with the log-sum-exp already subtracted, so that one exp2 in place makes
weights of them. Buffers of a strip stay in the cache and are used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import log, prod
from typing import Any

import torch
from torch import Tensor

from clearhead._impl._strips import Piece, plan, take
from clearhead._impl.problem import Problem
from clearhead.readings import (
    BlockMap,
    Entropy,
    LogSumExp,
    PerQuery,
    Reading,
    Received,
    TopK,
    by_cell,
)

__all__ = ["read"]

LOG2E, LN2 = 1 / log(2), log(2)
INF = float("inf")
# Rows of a strip, and elements in a buffer: what the second-level cache holds.
ROWS, ELEMENTS = 128, 1 << 19
# How many sources one maximum stands for when the largest weights are sought.
GROUP = 32


def read(problem: Problem, wanted: tuple[Reading, ...], lse: Tensor) -> list[Any]:
    """The part of each reading that can be had here; None for the others."""
    query, lead = problem.query.shape[-2], lse.shape[:-1]
    cells = next((reading.cells for reading in wanted if type(reading) is BlockMap), 1)
    found = [_gatherer(problem, reading, cells) for reading in wanted]
    busy = [each for each in found if each]
    for view in _views(problem, lse.reshape(-1, query)) if busy else ():
        for each in busy:
            each.see(view)
    rows = torch.arange(query)
    parts: list[Any] = [each and each.part(rows, lead) for each in found]
    return [
        PerQuery(rows, (lse,)) if type(reading) is LogSumExp else part
        for reading, part in zip(wanted, parts, strict=True)
    ]


@dataclass(eq=False)
class View:
    """A strip of some heads while it lies in the cache. Leads are samples times heads."""

    problem: Problem
    piece: Piece
    leads: slice
    weights: Tensor  # (lead, rows, columns); 0 where blocked
    logs: Tensor  # log2 of `weights` before they were normalised; 0 where blocked
    total: Tensor  # (lead, rows) what they were normalised by
    blocked: list[tuple[slice, Tensor]]  # columns of the piece, and where they are blocked
    sources: Tensor  # (columns,) positions

    @cached_property
    def entropy(self) -> Tensor:
        """(lead, rows). This uses up `logs`."""
        mean = torch.mul(self.weights, self.logs, out=self.logs).sum(-1)
        return (self.total.log() - LN2 * mean).clamp_(min=0)

    @property
    def counts(self) -> Tensor:
        """(1 or lead, rows): the number of allowed sources."""
        counts = torch.full((1, self.weights.shape[-2]), len(self.sources))
        for _, blocked in self.blocked:
            counts = counts - blocked.sum(-1)
        return counts

    @cached_property
    def allowed(self) -> Tensor:
        """(lead, rows, columns) bool, seldom needed."""
        allowed = torch.ones(self.weights.shape, dtype=torch.bool)
        for side, blocked in self.blocked:
            allowed[..., side] &= ~blocked
        return allowed

    def row_cells(self, cells: int) -> list[tuple[int, slice]]:
        """The tiles down that the strip touches, with its rows in each."""
        first, stop = self.piece.rows.start, self.piece.rows.stop
        bounds = _bounds(self.problem.query.shape[-2], cells)
        spans = ((i, max(a, first), min(b, stop)) for i, (a, b) in enumerate(pairwise(bounds)))
        return [(i, slice(a - first, b - first)) for i, a, b in spans if a < b]

    def sums(self, cells: int) -> Tensor:
        """(lead, tiles down, columns): what the columns receive from the rows of each tile."""
        if cells not in self._sums:
            spans = self.row_cells(cells)
            member = torch.zeros(len(spans), self.weights.shape[-2])
            for row, (_, span) in zip(member, spans, strict=True):
                row[span] = 1
            self._sums[cells] = member @ self.weights
        return self._sums[cells]

    @cached_property
    def _sums(self) -> dict[int, Tensor]:
        return {}

    def spread(self, values: Tensor) -> Tensor:
        """Values at the strip's columns as values at all sources, 0 elsewhere."""
        whole = values.new_zeros(*values.shape[:-1], self.problem.key.shape[-2])
        at = self.piece.columns
        if isinstance(at, Tensor):
            return whole.index_copy_(-1, at, values)
        whole[..., at] = values
        return whole


def _bounds(size: int, cells: int) -> list[int]:
    width, longer = divmod(size, min(cells, size))
    return [i * width + min(i, longer) for i in range(min(cells, size) + 1)]


def _views(problem: Problem, lse: Tensor) -> Iterator[View]:
    """Compute strip after strip; a view is only good until the next one comes."""
    group, source = problem.group, problem.key.shape[-2]
    query = problem.query.flatten(0, -3).float() * (problem.scale * LOG2E)
    key = problem.key.flatten(0, -3).float()
    offset = (lse * -LOG2E).unsqueeze(-1)
    height = min(max(ELEMENTS // (group * source), 16), ROWS)
    room = Buffers()
    for piece in plan(problem, height):
        if not piece.width:
            continue
        rows, columns = piece.positions(query.device)
        shut = [(side, *_tiles(problem, rows, columns[side])) for side in piece.shut]
        step = max(1, ELEMENTS // (group * len(rows) * piece.width))
        for at in range(0, len(key), step):
            stop = min(at + step, len(key))
            leads = slice(at * group, stop * group)
            shape = (stop - at, group * len(rows), piece.width)
            logs, weights = room.pair(shape)
            torch.baddbmm(
                offset[leads, piece.rows].reshape(*shape[:2], 1),
                query[leads, piece.rows].reshape(*shape[:2], -1),
                take(key[at:stop], piece.columns).mT,
                out=logs,
            )
            logs, weights = (x.view(-1, len(rows), piece.width) for x in (logs, weights))
            blocked = [(side, tiles[which[leads]]) for side, tiles, which in shut]
            total = _exponentiate(logs, weights, blocked)
            yield View(problem, piece, leads, weights, logs, total, blocked, columns)


class Buffers:
    """Two pieces of memory that grow to the largest strip and are used again."""

    def __init__(self) -> None:
        self.held = [torch.empty(0), torch.empty(0)]

    def pair(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        size = prod(shape)
        if len(self.held[0]) < size:
            self.held = [torch.empty(size), torch.empty(size)]
        first, second = (x[:size].view(shape) for x in self.held)
        return first, second


def _tiles(problem: Problem, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Where these edges are blocked, (tile, rows, columns), and which tile each lead has."""
    allowed = problem.allowed(rows, columns)
    assert allowed is not None
    *lead, _, _ = allowed.shape
    which = torch.arange(prod(lead)).view(lead).expand(problem.query.shape[:-2]).flatten()
    return ~allowed.reshape(-1, *allowed.shape[-2:]), which


def _exponentiate(logs: Tensor, weights: Tensor, blocked: list[tuple[slice, Tensor]]) -> Tensor:
    """From logs to weights that sum to one, in place; return what they summed to before."""
    for side, shut in blocked:
        logs[..., side].masked_fill_(shut, -INF)
    torch.exp2(logs, out=weights)
    for side, shut in blocked:
        logs[..., side].masked_fill_(shut, 0)
    # Scores here and those behind the log-sum-exp are rounded apart: without this, rows of large
    # scores would miss one by a few times 1e-6.
    total = weights.sum(-1)
    total.masked_fill_(total == 0, 1)
    weights.mul_(total.reciprocal().unsqueeze(-1))
    return total


def _gatherer(problem: Problem, reading: Reading, cells: int) -> Any:
    if problem.dtype != torch.float32:
        return None
    if type(reading) is Received:
        return _Received(problem, cells)
    kinds = {Entropy: _Entropy, BlockMap: _BlockMap, TopK: _TopK}
    kind = kinds.get(type(reading))
    return kind and kind(problem, reading)


def _leads(problem: Problem) -> int:
    return prod(problem.query.shape[:-2])


class _Entropy:
    def __init__(self, problem: Problem, reading: Entropy):
        shape = (_leads(problem), problem.query.shape[-2])
        self.entropy = torch.zeros(shape)
        self.counts = torch.zeros(shape, dtype=torch.int64) if reading.normalized else None

    def see(self, view: View) -> None:
        self.entropy[view.leads, view.piece.rows] = view.entropy
        if self.counts is not None:
            self.counts[view.leads, view.piece.rows] = view.counts

    def part(self, rows: Tensor, lead: torch.Size) -> PerQuery:
        found = (self.entropy,) if self.counts is None else (self.entropy, self.counts)
        return PerQuery(rows, tuple(x.view(*lead, len(rows)) for x in found))


class _Received:
    def __init__(self, problem: Problem, cells: int):
        self.sums = torch.zeros(_leads(problem), problem.key.shape[-2])
        # A block map's sums are those of its tiles' rows: they are shared.
        self.cells = cells

    def see(self, view: View) -> None:
        received, at = view.sums(self.cells).sum(-2), view.piece.columns
        if isinstance(at, Tensor):
            self.sums[view.leads].index_add_(-1, at, received)
        else:
            self.sums[view.leads, at] += received

    def part(self, rows: Tensor, lead: torch.Size) -> Tensor:
        return self.sums.view(*lead, -1)


class _BlockMap:
    def __init__(self, problem: Problem, reading: BlockMap):
        query, source = problem.query.shape[-2], problem.key.shape[-2]
        self.cells = reading.cells
        down, across = min(self.cells, query), min(self.cells, source)
        self.sums = torch.zeros(_leads(problem), down, across)
        self.peaks = torch.zeros_like(self.sums)
        sizes = (torch.tensor(_bounds(size, self.cells)).diff() for size in (query, source))
        down, across = sizes
        self.edges = down[:, None] * across

    def see(self, view: View) -> None:
        spans = view.row_cells(self.cells)
        tiles = slice(spans[0][0], spans[-1][0] + 1)
        peaks = torch.stack([view.weights[:, span].amax(-2) for _, span in spans], -2)
        self.sums[view.leads, tiles] += by_cell(
            view.spread(view.sums(self.cells)), self.cells, torch.sum
        )
        into = self.peaks[view.leads, tiles]
        torch.maximum(into, by_cell(view.spread(peaks), self.cells, torch.amax), out=into)

    def part(self, rows: Tensor, lead: torch.Size) -> tuple[Tensor, Tensor]:
        shape = (*lead, *self.sums.shape[-2:])
        return (self.sums / self.edges).view(shape), self.peaks.view(shape)


class _TopK:
    """The k largest lie in the k groups with the largest maxima: only those are looked through.

    A key holds a weight's bits above its column counted from the end, so that integers sort as
    the weights do, ties to the lower source.
    """

    def __init__(self, problem: Problem, reading: TopK):
        self.k = reading.k
        shape = (_leads(problem), problem.query.shape[-2], self.k)
        self.weights, self.sources = torch.zeros(shape), torch.full(shape, -1)

    def see(self, view: View) -> None:
        weights, width = view.weights, view.weights.shape[-1]
        if width // GROUP > self.k:
            keys, sure = self._by_groups(weights)
            if not sure.all():
                doubt = ~sure
                keys[doubt] = self._by_sorting(weights[doubt], view.allowed[doubt])
        else:
            keys = self._by_sorting(weights, view.allowed)
        real = keys >= 0
        found = torch.where(real, keys >> 32, 0).to(torch.int32).view(torch.float32)
        column = torch.where(real, width - 1 - (keys & 0xFFFFFFFF), 0)
        kept = (view.leads, view.piece.rows, slice(0, keys.shape[-1]))
        self.weights[kept] = found
        self.sources[kept] = torch.where(real, view.sources[column], -1)

    def _by_groups(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Keys of the k largest, and in which rows they are sure: no tie, no underflow."""
        width, k = weights.shape[-1], self.k
        groups = width // GROUP
        main = weights[..., : groups * GROUP].unflatten(-1, (GROUP, groups))
        best = main.amax(-2).topk(k + 1, -1)
        member = torch.arange(0, groups * GROUP, groups)
        columns = (best.indices[..., :k, None] + member).flatten(-2)
        rest = torch.arange(groups * GROUP, width).expand(*columns.shape[:-1], -1)
        columns = torch.cat([columns, rest], -1)
        keys = _keys(weights.gather(-1, columns), columns, width).topk(k, -1).values
        least = (keys[..., -1] >> 32).to(torch.int32).view(torch.float32)
        return keys, (least > best.values[..., k]) & (least > 0)

    def _by_sorting(self, weights: Tensor, allowed: Tensor) -> Tensor:
        width = weights.shape[-1]
        keys = _keys(weights, torch.arange(width), width).masked_fill_(~allowed, -1)
        return keys.topk(min(self.k, width), -1).values

    def part(self, rows: Tensor, lead: torch.Size) -> PerQuery:
        shape = (*lead, *self.weights.shape[-2:])
        return PerQuery(rows, (self.weights.view(shape), self.sources.view(shape)))


def _keys(weights: Tensor, columns: Tensor, width: int) -> Tensor:
    return (weights.view(torch.int32).to(torch.int64) << 32) | (width - 1 - columns)
