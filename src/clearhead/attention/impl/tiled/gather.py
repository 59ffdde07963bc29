"""Readings gathered strip by strip while the weights lie in the cache."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import log, prod
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.impl.tiled.strips import Piece, plan
from clearhead.attention.problem import Problem
from clearhead.readings import (
    BlockMap,
    Distance,
    Entropy,
    Mass,
    PerQuery,
    Reading,
    Received,
    TopK,
    by_cell,
)

__all__ = ["View", "gatherers", "tiles_of"]

LN2 = log(2)
NAN_BITS = 0x7FC00000
# How many sources one maximum stands for when the largest weights are sought.
GROUP = 8


@dataclass(eq=False)
class View:
    """A strip of some heads while it lies in the cache. Leads are samples times heads."""

    problem: Problem
    piece: Piece
    leads: slice
    weights: Tensor  # (lead, rows, columns); 0 where blocked
    logs: Tensor  # log2 of `weights` before they were divided by `total`; 0 where blocked
    total: Tensor  # (lead, rows); 1 for an empty row
    blocked: list[tuple[slice, Tensor]]  # columns of the piece, and where they are blocked

    @cached_property
    def poisoned(self) -> bool:
        """Whether a NaN was read somewhere: it must not leave its own edges."""
        return bool(self.total.isnan().any())

    def normalize(self) -> None:
        """Make the weights sum to one."""
        self.weights.mul_(self.total.reciprocal().unsqueeze(-1))
        if self.poisoned:
            self.weights.masked_fill_(~self.allowed, 0)

    @cached_property
    def entropy(self) -> Tensor:
        """(lead, rows). This uses up `logs`."""
        mean = torch.mul(self.weights, self.logs, out=self.logs).sum(-1)
        if mean.isnan().any():  # 0 * -inf: an allowed score was -inf
            mean = self.logs.masked_fill_(self.weights == 0, 0).sum(-1)
        return (self.total.log() - LN2 * mean).clamp_(min=0)

    @property
    def counts(self) -> Tensor:
        """(1 or lead, rows): the number of allowed sources."""
        counts = torch.full((1, self.weights.shape[-2]), self.piece.width)
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

    def tiles(self, cells: int) -> tuple[int, list[slice]]:
        """The first tile down that the strip touches, and its rows in each from there."""
        rows = self.piece.rows
        return _tiles_of(rows.start, rows.stop, self.problem.query.shape[-2], cells)

    def sums(self, cells: int) -> Tensor:
        """(lead, tiles down, columns): what the columns receive from the rows of each tile."""
        if cells not in self._sums and self.poisoned:
            sums = [self.weights[:, span].sum(-2) for span in self.tiles(cells)[1]]
            self._sums[cells] = torch.stack(sums, -2)
        if cells not in self._sums:
            rows = self.piece.rows
            member = _member(rows.start, rows.stop, self.problem.query.shape[-2], cells)
            self._sums[cells] = member.expand(len(self.weights), -1, -1) @ self.weights
        return self._sums[cells]

    @cached_property
    def _sums(self) -> dict[int, Tensor]:
        return {}

    def positions(self, columns: Tensor) -> Tensor:
        """The sources that columns of the piece stand for."""
        at = self.piece.columns
        return at[columns] if isinstance(at, Tensor) else columns + at.start

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


@lru_cache(maxsize=1024)
def _tiles_of(start: int, stop: int, size: int, cells: int) -> tuple[int, list[slice]]:
    bounds = _bounds(size, cells)
    first = bisect(bounds, start) - 1
    cuts = [start, *(bound for bound in bounds if start < bound < stop), stop]
    return first, [slice(a - start, b - start) for a, b in pairwise(cuts)]


@lru_cache(maxsize=1024)
def _member(start: int, stop: int, size: int, cells: int) -> Tensor:
    """(tiles, rows): 1 where the row belongs to the tile."""
    _, spans = _tiles_of(start, stop, size, cells)
    member = torch.zeros(len(spans), stop - start, dtype=torch.float32)
    for row, span in zip(member, spans, strict=True):
        row[span] = 1
    return member


def tiles_of(problem: Problem, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The mask's tiles, (tile, rows, columns), and which of them each lead has."""
    allowed = problem.allowed(rows, columns)
    assert allowed is not None
    *lead, _, _ = allowed.shape
    which = torch.arange(prod(lead)).view(lead).expand(problem.query.shape[:-2]).flatten()
    return allowed.reshape(-1, *allowed.shape[-2:]), which


def gatherers(problem: Problem, wanted: tuple[Reading, ...], height: int) -> list[Any]:
    """One for each reading: it `see`s every view and then has the `part`. None: not known here."""
    if problem.dtype != torch.float32:
        return [None] * len(wanted)
    cells = next((reading.cells for reading in wanted if type(reading) is BlockMap), 1)
    return [_gatherer(problem, reading, cells, height) for reading in wanted]


def _gatherer(problem: Problem, reading: Reading, cells: int, height: int) -> Any:
    if type(reading) is Received:
        return _Received(problem, cells)
    if type(reading) is Mass:
        return _Mass(problem, reading, height)
    kinds = {Entropy: _Entropy, BlockMap: _BlockMap, TopK: _TopK, Distance: _Distance}
    kind = kinds.get(type(reading))
    return kind and kind(problem, reading)


def _leads(problem: Problem) -> int:
    return prod(problem.query.shape[:-2])


class _Entropy:
    needs_logs = True

    def __init__(self, problem: Problem, reading: Entropy):
        shape = (_leads(problem), problem.query.shape[-2])
        self.entropy = torch.zeros(shape, dtype=torch.float32)
        self.counts = torch.zeros(shape, dtype=torch.int64) if reading.normalized else None

    def see(self, view: View) -> None:
        self.entropy[view.leads, view.piece.rows] = view.entropy
        if self.counts is not None:
            self.counts[view.leads, view.piece.rows] = view.counts

    def part(self, rows: Tensor, lead: torch.Size) -> PerQuery:
        found = (self.entropy,) if self.counts is None else (self.entropy, self.counts)
        return PerQuery(rows, tuple(x.view(*lead, len(rows)) for x in found))


class _Distance:
    needs_logs = False

    def __init__(self, problem: Problem, reading: Distance):
        self.found = torch.zeros(_leads(problem), problem.query.shape[-2], dtype=torch.float32)
        self.offset = problem.key.shape[-2] - problem.query.shape[-2]

    def see(self, view: View) -> None:
        rows, columns = view.piece.positions(self.found.device)
        distance = ((rows + self.offset)[:, None] - columns).abs().to(torch.float32)
        self.found[view.leads, view.piece.rows] = (view.weights * distance).sum(-1)

    def part(self, rows: Tensor, lead: torch.Size) -> PerQuery:
        return PerQuery(rows, (self.found.view(*lead, len(rows)),))


class _Mass:
    needs_logs = False

    def __init__(self, problem: Problem, reading: Mass, height: int):
        self.found = torch.zeros(_leads(problem), problem.query.shape[-2], dtype=torch.float32)
        self.problem = replace(problem, mask=reading.edges)
        # Strip by strip, the sources that any edge leads to: seldom more than a few.
        self.pieces = {piece.rows.start: piece for piece in plan(self.problem, height)}

    def see(self, view: View) -> None:
        edges, at = self.pieces[view.piece.rows.start].columns, view.piece.columns
        weights = view.weights
        if isinstance(edges, slice) and isinstance(at, slice):
            both = slice(max(edges.start, at.start), min(edges.stop, at.stop))
            if both.start >= both.stop:
                return
            weights = weights[..., both.start - at.start : both.stop - at.start]
            at = both
        rows, columns = Piece(view.piece.rows, at, slice(0, 0)).positions(weights.device)
        tiles, which = tiles_of(self.problem, rows, columns)
        inside = torch.where(tiles[which[view.leads]], weights, 0)
        self.found[view.leads, view.piece.rows] = inside.sum(-1)

    def part(self, rows: Tensor, lead: torch.Size) -> PerQuery:
        return PerQuery(rows, (self.found.view(*lead, len(rows)),))


class _Received:
    needs_logs = False

    def __init__(self, problem: Problem, cells: int):
        self.sums = torch.zeros(_leads(problem), problem.key.shape[-2], dtype=torch.float32)
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
    needs_logs = False

    def __init__(self, problem: Problem, reading: BlockMap):
        query, source = problem.query.shape[-2], problem.key.shape[-2]
        self.cells = reading.cells
        down, across = min(self.cells, query), min(self.cells, source)
        self.sums = torch.zeros(_leads(problem), down, across, dtype=torch.float32)
        self.peaks = torch.zeros_like(self.sums)
        sizes = (torch.tensor(_bounds(size, self.cells)).diff() for size in (query, source))
        down, across = sizes
        self.edges = down[:, None] * across

    def see(self, view: View) -> None:
        first, spans = view.tiles(self.cells)
        tiles = (view.leads, slice(first, first + len(spans)))
        peaks = [view.weights[:, span].amax(-2) for span in spans]
        for total, found, how, join in (
            (self.sums, view.sums(self.cells), torch.sum, torch.add),
            (self.peaks, torch.stack(peaks, -2), torch.amax, torch.maximum),
        ):
            into = total[tiles]
            join(into, by_cell(view.spread(found), self.cells, how), out=into)

    def part(self, rows: Tensor, lead: torch.Size) -> tuple[Tensor, Tensor]:
        shape = (*lead, *self.sums.shape[-2:])
        return (self.sums / self.edges).view(shape), self.peaks.view(shape)


class _TopK:
    """The k largest lie in the k groups with the largest maxima: only those are looked through."""

    needs_logs = False

    def __init__(self, problem: Problem, reading: TopK):
        self.k = reading.k
        shape = (_leads(problem), problem.query.shape[-2], self.k)
        self.weights = torch.zeros(shape, dtype=torch.float32)
        self.sources = torch.full(shape, -1)

    def see(self, view: View) -> None:
        weights, width = view.weights, view.weights.shape[-1]
        if width > self.k:
            bits, columns, sure = self._by_groups(weights)
            if view.poisoned:
                sure &= ~view.total.isnan()
            if not sure.all():
                doubt = ~sure
                kept = self._by_sorting(weights[doubt], view.allowed[doubt])
                bits[doubt], columns[doubt] = kept
        else:
            bits, columns = self._by_sorting(weights, view.allowed)
        kept = (view.leads, view.piece.rows, slice(0, bits.shape[-1]))
        self.weights[kept] = bits.view(torch.float32)
        real = columns >= 0
        if real.all():
            self.sources[kept] = view.positions(columns)
        else:
            found = view.positions(columns.clamp(min=0))
            self.sources[kept] = torch.where(real, found, -1)

    def _by_groups(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bits and columns of the k largest, and in which rows they are sure."""
        bits, columns, left_out = _find(weights, self.k)
        # Unsure are rows with a tie, within or with what was left out, or an underflow.
        bits, least = bits[..., :-1], bits[..., -2]
        tied = (bits[..., 1:] == bits[..., :-1]).any(-1)
        return bits, columns, (least > left_out.clamp_(min=0)) & ~tied

    def _by_sorting(self, weights: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """The same by keys of a weight's bits above its column counted from the end.

        As integers they sort as the weights do, ties to the lower source. Blocked: 0 and -1.
        """
        last = weights.shape[-1] - 1
        # NaN has many bits, some of them negative: here it is the largest of all.
        keys = weights.view(torch.int32).masked_fill(weights.isnan(), NAN_BITS)
        keys = keys.to(torch.int64) << 32
        keys = (keys | (last - torch.arange(last + 1))).masked_fill_(~allowed, -1)
        keys = keys.topk(min(self.k, last + 1), -1).values
        real = keys >= 0
        bits = torch.where(real, keys >> 32, 0).to(torch.int32)
        return bits, torch.where(real, last - (keys & 0xFFFFFFFF), -1)

    def part(self, rows: Tensor, lead: torch.Size) -> PerQuery:
        shape = (*lead, *self.weights.shape[-2:])
        return PerQuery(rows, (self.weights.view(shape), self.sources.view(shape)))


def _peaks(x: Tensor) -> Tensor:
    """The largest of each group. Members of a group lie as far apart as there are groups."""
    groups = x.shape[-1] // GROUP
    return x[..., : groups * GROUP].unflatten(-1, (GROUP, groups)).amax(-2)


def _members(groups: Tensor, size: int) -> Tensor:
    """The places of the groups' members, and of what is left over when `size` is grouped."""
    count = size // GROUP
    members = (groups.unsqueeze(-1) + torch.arange(0, count * GROUP, count)).flatten(-2)
    if count * GROUP == size:
        return members
    rest = torch.arange(count * GROUP, size).expand(*members.shape[:-1], -1)
    return torch.cat([members, rest], -1)


def _find(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bits of the k + 1 largest, places of the k largest, and the bits of the next one or more."""
    if x.shape[-1] // GROUP <= k:
        bits, places = _best(x, k)
        return bits, places, bits[..., -1]
    _, groups, left_out = _find(_peaks(x), k)
    near = _members(groups, x.shape[-1])
    bits, found = _best(x.gather(-1, near), k)
    return bits, near.gather(-1, found), torch.maximum(left_out, bits[..., -1])


def _best(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Bits of the k + 1 largest, sorted, and the places of the k largest.

    Bits of floats that are not negative sort as the floats do, in half the time.
    """
    best = x.view(torch.int32).topk(k + 1, -1)
    return best.values, best.indices[..., :k]
