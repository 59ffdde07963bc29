"""Readings gathered strip by strip while the weights lie in the cache: one class a reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from clearhead import readings
from clearhead.attention.impl.tiled.strips import Piece, plan
from clearhead.attention.impl.tiled.view import LN2, View, tiles_of
from clearhead.attention.problem import Problem
from clearhead.readings import PerQuery, Reading, by_cell, cell_bounds

__all__ = ["Gatherer", "Layout", "gatherers"]

LARGEST, LEAST = (1 << 31) - 1, -(1 << 63)
# How many sources one maximum stands for in the search for the largest weights.
GROUP = 8


@dataclass(frozen=True)
class Layout:
    """What all gatherers of a call share: the rows of a strip, and the cells that sums come in."""

    height: int
    cells: int = 1


class Gatherer:
    """Gathers one reading: it sees every view, and then has the reading's part."""

    # Whether it sees the views at all, and whether it needs the logs of their weights.
    needs_weights = True
    needs_logs = False

    def __init__(self, problem: Problem, reading: Any, layout: Layout):
        self.leads, self.rows = prod(problem.query.shape[:-2]), problem.query.shape[-2]

    def see(self, view: View) -> None:
        """Take what the reading needs from a view, which is valid until the next one comes."""

    def part(self, rows: Tensor, lse: Tensor) -> Any:
        """Return the part of all rows; `lse` is (*batch, head, rows)."""
        raise NotImplementedError

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(self.leads, *shape, dtype=torch.float32)


class LogSumExp(Gatherer):
    """The pass over the strips computes it for its own use."""

    needs_weights = False

    def part(self, rows: Tensor, lse: Tensor) -> PerQuery:
        """Return the log-sum-exp itself."""
        return PerQuery(rows, (lse,))


class MaxScore(Gatherer):
    """What the pass subtracts from the scores of each row, back from base 2."""

    def __init__(self, problem: Problem, reading: readings.MaxScore, layout: Layout):
        super().__init__(problem, reading, layout)
        self.found = self._zeros(self.rows)

    def see(self, view: View) -> None:
        """Store the view's rows."""
        torch.mul(view.shift, LN2, out=self.found[view.leads, view.piece.rows])

    def part(self, rows: Tensor, lse: Tensor) -> PerQuery:
        """Return the largest scores: -inf where the row is empty."""
        return PerQuery(
            rows, (self.found.view(lse.shape).masked_fill(lse == -torch.inf, -torch.inf),)
        )


class Entropy(Gatherer):
    """Entropy from the logs of the weights, and the number of sources where it is normalized."""

    needs_logs = True

    def __init__(self, problem: Problem, reading: readings.Entropy, layout: Layout):
        super().__init__(problem, reading, layout)
        self.entropy, self.counts = self._zeros(self.rows), None
        if reading.normalized:
            self.counts = torch.zeros(self.leads, self.rows, dtype=torch.int64)

    def see(self, view: View) -> None:
        """Store the view's rows."""
        self.entropy[view.leads, view.piece.rows] = view.entropy
        if self.counts is not None:
            self.counts[view.leads, view.piece.rows] = view.counts

    def part(self, rows: Tensor, lse: Tensor) -> PerQuery:
        """Return the entropy, and the number of sources where it is normalized."""
        found = (self.entropy,) if self.counts is None else (self.entropy, self.counts)
        return PerQuery(rows, tuple(x.view(lse.shape) for x in found))


class Distance(Gatherer):
    """Mean distance, one product with the distances of a strip."""

    def __init__(self, problem: Problem, reading: readings.Distance, layout: Layout):
        super().__init__(problem, reading, layout)
        self.found = self._zeros(self.rows)
        self.offset = problem.key.shape[-2] - self.rows

    def see(self, view: View) -> None:
        """Store the view's rows."""
        rows, columns = view.piece.positions(self.found.device)
        distance = ((rows + self.offset)[:, None] - columns).abs().to(torch.float32)
        self.found[view.leads, view.piece.rows] = (view.weights * distance).sum(-1)

    def part(self, rows: Tensor, lse: Tensor) -> PerQuery:
        """Return the distance of each row."""
        return PerQuery(rows, (self.found.view(lse.shape),))


class Mass(Gatherer):
    """Mass on a set of edges, of which only the sources that any edge leads to are examined."""

    def __init__(self, problem: Problem, reading: readings.Mass, layout: Layout):
        super().__init__(problem, reading, layout)
        self.found = self._zeros(self.rows)
        self.problem = replace(problem, mask=reading.edges)
        # Strip by strip, the sources that any edge leads to are few as a rule.
        self.pieces = {piece.rows.start: piece for piece in plan(self.problem, layout.height)}

    def see(self, view: View) -> None:
        """Store the view's rows."""
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

    def part(self, rows: Tensor, lse: Tensor) -> PerQuery:
        """Return the mass of each row."""
        return PerQuery(rows, (self.found.view(lse.shape),))


class Received(Gatherer):
    """Sums over the rows of each strip; a block map of the same call shares them."""

    def __init__(self, problem: Problem, reading: readings.Received, layout: Layout):
        super().__init__(problem, reading, layout)
        self.sums = self._zeros(problem.key.shape[-2])
        self.cells = layout.cells

    def see(self, view: View) -> None:
        """Add what the columns receive from the view's rows."""
        received, at = view.sums(self.cells).sum(-2), view.piece.columns
        if isinstance(at, Tensor):
            self.sums[view.leads].index_add_(-1, at, received)
        else:
            self.sums[view.leads, at] += received

    def part(self, rows: Tensor, lse: Tensor) -> Tensor:
        """Return the sums over all rows."""
        return self.sums.view(*lse.shape[:-1], -1)


class BlockMap(Gatherer):
    """Sum and largest weight of each tile."""

    def __init__(self, problem: Problem, reading: readings.BlockMap, layout: Layout):
        super().__init__(problem, reading, layout)
        self.cells, sizes = reading.cells, (self.rows, problem.key.shape[-2])
        down, across = (torch.tensor(cell_bounds(size, self.cells)).diff() for size in sizes)
        self.sums = self._zeros(len(down), len(across))
        self.peaks = torch.zeros_like(self.sums)
        self.edges = down[:, None] * across

    def see(self, view: View) -> None:
        """Add the view's rows to their tiles."""
        first, spans = view.tiles(self.cells)
        tiles = (view.leads, slice(first, first + len(spans)))
        peaks = [view.weights[:, span].amax(-2) for span in spans]
        for total, found, how, join in (
            (self.sums, view.sums(self.cells), torch.sum, torch.add),
            (self.peaks, torch.stack(peaks, -2), torch.amax, torch.maximum),
        ):
            into = total[tiles]
            join(into, by_cell(view.spread(found), self.cells, how), out=into)

    def part(self, rows: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the largest weight of each tile."""
        shape = (*lse.shape[:-1], *self.sums.shape[-2:])
        return (self.sums / self.edges).view(shape), self.peaks.view(shape)


class TopK(Gatherer):
    """The k largest lie in the k groups with the largest maxima: only those are searched."""

    def __init__(self, problem: Problem, reading: readings.TopK, layout: Layout):
        super().__init__(problem, reading, layout)
        self.k = reading.k
        self.weights = self._zeros(self.rows, self.k)
        self.sources = torch.full(self.weights.shape, -1)

    def see(self, view: View) -> None:
        """Store the view's rows."""
        weights, width = view.weights, view.weights.shape[-1]
        if width > self.k:
            bits, columns, sure = self._by_groups(weights, view.shift)
            if view.poisoned:
                sure &= ~view.total.isnan()
            if not sure.all():
                bits[~sure], columns[~sure] = self._by_sorting(view, ~sure)
        else:
            every = torch.ones(weights.shape[:-1], dtype=torch.bool)
            bits, columns = (x.view(*weights.shape[:-1], -1) for x in self._by_sorting(view, every))
        place = (view.leads, view.piece.rows, slice(0, bits.shape[-1]))
        self.weights[place] = bits.view(torch.float32)
        real = columns >= 0
        if real.all():
            self.sources[place] = view.positions(columns)
        else:
            found = view.positions(columns.clamp(min=0))
            self.sources[place] = torch.where(real, found, -1)

    def _by_groups(self, weights: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bits and columns of the k largest, and the rows in which they are certain."""
        bits, columns, left_out = _find(weights, self.k)
        # A tie, among them or with what was left out, or an underflow leaves a row uncertain.
        bits, least = bits[..., :-1], bits[..., -2]
        # Weights of equal scores are as far apart as their exponents are rounded, which lie between
        # the shift and that less the log of the weight.
        shift = (2 * shift.abs()).clamp(max=1 << 29).to(torch.int32).unsqueeze(-1)
        apart = shift + 2 * (130 - (bits >> 23))
        tied = (bits[..., :-1] - bits[..., 1:] <= apart[..., 1:]).any(-1)
        return bits, columns, (least - left_out.clamp_(min=0) > apart[..., -1]) & ~tied

    def _by_sorting(self, view: View, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The same of some rows by their scores, ties to the lower source. Blocked: 0 and -1."""
        weights, scores = view.weights[rows], view.scores(rows)
        blocked = ~view.allowed[rows] | (scores == -torch.inf)
        # Integers that sort as the scores, and of equal ones by the column counted from the end.
        # NaN has many bit patterns: here it is the largest of all. -0 becomes 0.
        keys = (scores + 0.0).view(torch.int32)
        keys = torch.where(keys < 0, keys ^ LARGEST, keys).masked_fill_(weights.isnan(), LARGEST)
        last = weights.shape[-1] - 1
        keys = (keys.to(torch.int64) << 32) | (last - torch.arange(last + 1))
        best = keys.masked_fill_(blocked, LEAST).topk(min(self.k, last + 1), -1).indices
        real = ~blocked.gather(-1, best)
        bits = weights.gather(-1, best).masked_fill_(~real, 0).view(torch.int32)
        return bits, torch.where(real, best, -1)

    def part(self, rows: Tensor, lse: Tensor) -> PerQuery:
        """Return the weights and sources of each row."""
        weights, sources = (x.view(*lse.shape, self.k) for x in (self.weights, self.sources))
        # Parts of all rows are not merged: these scores are as exact as the weights.
        scores = torch.where(sources < 0, -torch.inf, weights.log() + lse.unsqueeze(-1))
        return PerQuery(rows, (weights, sources, scores))


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
    left_over = torch.arange(count * GROUP, size).expand(*members.shape[:-1], -1)
    return torch.cat([members, left_over], -1)


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


GATHERERS: dict[type[Reading], type[Gatherer]] = {
    readings.LogSumExp: LogSumExp,
    readings.MaxScore: MaxScore,
    readings.Entropy: Entropy,
    readings.Distance: Distance,
    readings.Mass: Mass,
    readings.Received: Received,
    readings.BlockMap: BlockMap,
    readings.TopK: TopK,
}


def gatherers(problem: Problem, read: Sequence[Reading], height: int) -> list[Gatherer | None]:
    """Return one gatherer for each reading; None for a reading without one."""
    cells = next((r.cells for r in read if type(r) is readings.BlockMap), 1)
    layout, found = Layout(height, cells), []
    for reading in read:
        kind = GATHERERS.get(type(reading))
        if kind and kind.needs_weights and problem.dtype != torch.float32:
            kind = None
        found.append(kind and kind(problem, reading, layout))
    return found
