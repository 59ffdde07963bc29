"""About how much work each pair of ranks has: the edges that a mask allows, in cells of rows."""

from __future__ import annotations

from itertools import accumulate, pairwise

from clearhead._core import Sizes
from clearhead.distributed.sequence.plan import Plan, Portion, Shares
from clearhead.masks import EMPTY, FULL, Mask
from clearhead.readings import cell_bounds

__all__ = ["CELLS", "Cells", "edges", "loads", "work_of"]

# A rectangle that a mask allows in part is asked in so many cells a side.
CELLS = 8

# For each (rank of the queries, rank of the sources): the edges in each cell of rows.
Cells = dict[tuple[int, int], tuple[float, ...]]


def work_of(mask: Mask | None, shares: Shares) -> Cells:
    """The work of all pairs of ranks that have edges."""
    rows, columns = _ranges(shares.queries), _ranges(shares.sources)
    cells = {
        (i, j): _cells(mask, rows[i], columns[j], shares.sizes)
        for i in shares.ranks
        for j in shares.ranks
    }
    return {pair: edges for pair, edges in cells.items() if any(edges)}


def _ranges(lengths: tuple[int, ...]) -> list[range]:
    return [range(*pair) for pair in pairwise(accumulate(lengths, initial=0))]


def _cells(mask: Mask | None, rows: range, columns: range, sizes: Sizes) -> tuple[float, ...]:
    """About how many edges each cell of rows has; 0 in all only where there is none."""
    kind = _kind(mask, rows, columns, sizes)
    cells = [rows[a:b] for a, b in pairwise(cell_bounds(len(rows), CELLS))]
    if kind in (EMPTY, FULL):
        return tuple(float(len(cell) * len(columns) * (kind == FULL)) for cell in cells)
    across = [columns[a:b] for a, b in pairwise(cell_bounds(len(columns), CELLS))]
    # Of a cell that the mask allows in part, half of the edges count.
    return tuple(
        sum(len(cell) * len(part) * _kind(mask, cell, part, sizes) / FULL for part in across)
        for cell in cells
    )


def _kind(mask: Mask | None, rows: range, columns: range, sizes: Sizes) -> int:
    if not (rows and columns):
        return EMPTY
    return FULL if mask is None else mask.block(rows, columns, sizes.query, sizes.source)


def loads(work: Cells, plan: Plan) -> list[float]:
    """The work of each rank."""
    found = [0.0] * len(plan.shares.ranks)
    for portion in plan.portions:
        found[portion.at] += edges(work, plan.shares, portion)
    return found


def edges(work: Cells, shares: Shares, part: Portion) -> float:
    """About how many edges a portion has, for one head of each group."""
    size, heads = shares.queries[part.home], part.heads.stop - part.heads.start
    cells = [sum(x) for x in zip(*(work[part.home, j] for j in part.sources), strict=True)]
    total = 0.0
    for (start, stop), count in zip(pairwise(cell_bounds(size, CELLS)), cells, strict=True):
        inside = min(part.rows.stop, stop) - max(part.rows.start, start)
        total += count * max(inside, 0) / (stop - start)
    return total * heads
