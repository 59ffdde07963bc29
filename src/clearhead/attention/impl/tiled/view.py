"""A strip of weights while it lies in the cache, and what several readings compute from it once."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import log, prod

import torch
from torch import Tensor

from clearhead.attention.impl.tiled.strips import Piece, take
from clearhead.attention.problem import Problem
from clearhead.readings import cell_bounds

__all__ = ["LN2", "View", "tiles_of"]

LN2 = log(2)


@dataclass(eq=False)
class View:
    """A strip of some heads while it lies in the cache. Leads are samples times heads."""

    problem: Problem
    piece: Piece
    leads: slice
    weights: Tensor  # (lead, rows, columns); 0 where blocked
    logs: Tensor  # log2 of `weights` before they were divided by `total`; 0 where blocked
    total: Tensor  # (lead, rows); 1 for an empty row
    shift: Tensor  # (lead, rows): what was subtracted from the scores, in base 2
    blocked: list[tuple[slice, Tensor]]  # columns of the piece, and where they are blocked

    @cached_property
    def poisoned(self) -> bool:
        """Whether a row has a NaN, which must stay with its own edges."""
        return bool(self.total.isnan().any())

    def normalize(self) -> None:
        """Make the weights sum to one."""
        self.weights.mul_(self.total.reciprocal().unsqueeze(-1))
        if self.poisoned:
            self.weights.masked_fill_(~self.allowed, 0)

    @cached_property
    def entropy(self) -> Tensor:
        """(lead, rows). This overwrites `logs`."""
        mean = torch.mul(self.weights, self.logs, out=self.logs).sum(-1)
        if mean.isnan().any():  # 0 * -inf: an allowed score was -inf
            mean = self.logs.masked_fill_(self.weights == 0, 0).sum(-1)
        return (self.total.log() - LN2 * mean).clamp_(min=0)

    @property
    def counts(self) -> Tensor:
        """(1 or lead, rows): the number of allowed sources."""
        counts = torch.full((1, self.weights.shape[-2]), self.piece.width)
        for _, blocked in self.blocked:
            # Head by head, because torch sums bools in a copy of 8 bytes each.
            counts = counts - torch.stack([x.sum(-1) for x in blocked])
        return counts

    def scores(self, rows: Tensor) -> Tensor:
        """Scores that order the sources of some rows, a (lead, rows) bool: (row, columns)."""
        problem, (leads, lines) = self.problem, rows.nonzero(as_tuple=True)
        query = problem.query.flatten(0, -3)[self.leads, self.piece.rows].to(problem.dtype)
        key = problem.key.flatten(0, -3)
        found = self.weights.new_empty(len(lines), self.weights.shape[-1])
        for lead in leads.unique().tolist():
            keys = take(key[(self.leads.start + lead) // problem.group], self.piece.columns)
            mine = leads == lead
            found[mine] = query[lead, lines[mine]] @ keys.to(problem.dtype).mT
        # A positive scale changes no order, but may round different scores to equal ones.
        return found if problem.scale > 0 else found.mul_(problem.scale)

    @cached_property
    def allowed(self) -> Tensor:
        """(lead, rows, columns) bool, computed on demand."""
        allowed = torch.ones(self.weights.shape, dtype=torch.bool)
        for side, blocked in self.blocked:
            allowed[..., side] &= ~blocked
        return allowed

    def tiles(self, cells: int) -> tuple[int, list[slice]]:
        """The first row of tiles that the strip touches, and its rows in each one from there."""
        rows = self.piece.rows
        return _tiles_of(rows.start, rows.stop, self.problem.query.shape[-2], cells)

    def sums(self, cells: int) -> Tensor:
        """(lead, tiles down, columns): what each column receives from the rows of each tile."""
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


@lru_cache(maxsize=1024)
def _tiles_of(start: int, stop: int, size: int, cells: int) -> tuple[int, list[slice]]:
    bounds = cell_bounds(size, cells)
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
