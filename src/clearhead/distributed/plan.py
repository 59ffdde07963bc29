"""Which rank computes which rectangle of the map: every rank makes the same plan from the mask."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from clearhead._core import Sizes
from clearhead.attention import Corner
from clearhead.distributed.section import Section
from clearhead.masks import EMPTY, FULL, Mask
from clearhead.readings import cell_bounds

__all__ = ["Plan", "Shares", "Task", "make_plan"]

# A rectangle that a mask allows in part is asked in so many cells a side.
CELLS = 4
# Whole heads are moved where this makes no rank's work larger than the mean by this factor.
UNEVEN = 1.05


class Task(NamedTuple):
    """A rectangle: the ranks of its queries and of its sources, and which heads and rows."""

    query: int
    source: int
    heads: slice  # source heads, with all query heads that share them
    rows: slice  # counted from the first query of the rank


@dataclass(frozen=True)
class Shares:
    """The sizes of the whole map, and how the positions are split over the ranks."""

    sizes: Sizes
    source_heads: int
    queries: tuple[int, ...]  # how many queries each rank has
    sources: tuple[int, ...]

    def whole(self, query: int, source: int) -> Task:
        """The task of all queries of one rank and all sources of another."""
        return Task(query, source, slice(0, self.source_heads), slice(0, self.queries[query]))

    @property
    def group(self) -> int:
        """How many query heads share one source head."""
        return self.sizes.head // max(self.source_heads, 1)

    def query_heads(self, task: Task) -> slice:
        """The query heads of a task."""
        return slice(task.heads.start * self.group, task.heads.stop * self.group)

    def corner(self, task: Task) -> Corner:
        """Where the task lies in the whole map."""
        query = sum(self.queries[: task.query]) + task.rows.start
        source = sum(self.sources[: task.source])
        return Corner(task.heads.start * self.group, query, source, self.sizes)

    def mask(self, mask: Mask | None, task: Task) -> Mask | None:
        """The mask of the task; None where it allows every edge."""
        heads, rows = ((x.stop - x.start) for x in (task.heads, task.rows))
        sources = self.sources[task.source]
        if mask is None:
            return None
        section = Section(mask, self.corner(task), heads * self.group, rows, sources)
        full = section.block(range(rows), range(sources), rows, sources) == FULL
        return None if full else section


@dataclass(frozen=True)
class Plan:
    """What each rank computes: rectangles of its own queries, and such as it takes from others."""

    shares: Shares
    # How many units, heads or rows, of the pair (query rank, source rank) the source rank takes.
    moved: dict[tuple[int, int], int]
    by_heads: bool

    def own(self, query: int, source: int) -> Task | None:
        """What the rank of the queries computes of a pair of ranks."""
        return self._part(query, source, taken=False)

    def taken(self, query: int, source: int) -> Task | None:
        """What the rank of the sources computes of a pair of ranks."""
        return self._part(query, source, taken=True)

    def _part(self, query: int, source: int, taken: bool) -> Task | None:
        if (query, source) not in self.moved:
            return None
        whole = self.shares.whole(query, source)
        units = whole.heads.stop if self.by_heads else whole.rows.stop
        cut = units - self.moved[query, source]
        part = slice(cut, units) if taken else slice(0, cut)
        if part.start >= part.stop:
            return None
        return whole._replace(heads=part) if self.by_heads else whole._replace(rows=part)


def make_plan(mask: Mask | None, shares: Shares, balance: bool = True) -> Plan:
    """Leave out pairs of ranks without edges, and even out the work of the ranks.

    Every rank computes with its own queries; of a pair (i, j) rank j may take some heads (or rows)
    over, for which the queries and the context travel in place of the keys and values.
    """
    ranks = range(len(shares.queries))
    work = {(i, j): _work(mask, shares, shares.whole(i, j)) for i in ranks for j in ranks}
    work = {pair: size for pair, size in work.items() if size}
    if not balance:
        return Plan(shares, dict.fromkeys(work, 0), True)
    plans = []
    for by_heads in (True, False):
        moved, largest = _evened(work, shares, by_heads)
        plans.append((largest, Plan(shares, moved, by_heads)))
    (largest, plan), (other, by_rows) = plans
    even = UNEVEN * sum(work.values()) / len(ranks)
    return plan if largest <= max(even, other) else by_rows


def _evened(
    work: dict[tuple[int, int], float], shares: Shares, by_heads: bool
) -> tuple[dict[tuple[int, int], int], float]:
    """How many units of each pair the sources' rank takes, and the largest work of a rank then."""
    ranks = range(len(shares.queries))
    loads = [sum(work.get((i, j), 0.0) for j in ranks) for i in ranks]
    mean, moved = sum(loads) / len(loads), dict.fromkeys(work, 0)
    for i in sorted(ranks, key=lambda rank: -loads[rank]):
        units = shares.source_heads if by_heads else shares.queries[i]
        for j in sorted(ranks, key=lambda rank: loads[rank]):
            room = min(loads[i] - mean, mean - loads[j])
            if i == j or room <= 0 or (i, j) not in work:
                continue
            unit = work[i, j] / units
            many = min(int(room / unit + 0.5), units)
            moved[i, j] = many
            loads[i] -= many * unit
            loads[j] += many * unit
    return moved, max(loads)


def _work(mask: Mask | None, shares: Shares, task: Task) -> float:
    """About how many edges a rectangle has; 0 only where it has none."""
    query, source, _ = shares.corner(task)[1:]
    rows = range(query, query + task.rows.stop)
    columns = range(source, source + shares.sources[task.source])
    return _edges(mask, rows, columns, shares.sizes, CELLS)


def _edges(mask: Mask | None, rows: range, columns: range, sizes: Sizes, cells: int) -> float:
    """Count half of the edges of a cell that a mask allows in part."""
    size = float(len(rows) * len(columns))
    kind = FULL if mask is None else mask.block(rows, columns, sizes.query, sizes.source)
    if not size or kind == EMPTY:
        return 0.0
    if kind == FULL or cells == 1:
        return size if kind == FULL else size / 2
    parts = [[x[a:b] for a, b in pairwise(cell_bounds(len(x), cells))] for x in (rows, columns)]
    found = [_edges(mask, a, b, sizes, 1) for a in parts[0] for b in parts[1]]
    return sum(found)
