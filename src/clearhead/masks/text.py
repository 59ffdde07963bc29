"""A mask in words and as a picture: the data of both first, then their text."""

from __future__ import annotations

from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead._core import Sizes, position, value_error
from clearhead.masks.protocol import MAX_TESTED, Block, Edge, EdgeSet, Tile

NONE, ALL = "·", "■"
# Shares of a tile: under a third, under two thirds, less than all.
SHADES = "░▒▓"
LEGEND = f"{NONE} none  {SHADES[0]} under 1/3  {SHADES[1]} under 2/3  {SHADES[2]} more  {ALL} all"
# The number of samples and heads of a mask that varies that are drawn unless one is asked for.
PICTURES = 4
# Without sizes, a mask is drawn for this many positions.
DEFAULT = 8
# Tiles of up to this many positions a side are tested edge by edge where `block` is PARTIAL.
TILE = 128


class Map(NamedTuple):
    """The share of allowed edges in every tile of a grid over queries and sources."""

    name: str  # which sample and head, where the mask varies
    rows: list[int]  # where the tiles start, and their end
    columns: list[int]
    shares: list[list[float]]

    @property
    def whole(self) -> bool:
        """Whether every tile is one edge."""
        return self.rows[-1] < len(self.rows) and self.columns[-1] < len(self.columns)

    @property
    def edges(self) -> int:
        """How many edges are allowed."""
        tall, wide = ([b - a for a, b in pairwise(at)] for at in (self.rows, self.columns))
        lines = zip(tall, self.shares, strict=True)
        return round(sum(a * sum(b * x for b, x in zip(wide, xs, strict=True)) for a, xs in lines))

    def __str__(self) -> str:
        return "\n".join(([self.name] if self.name else []) + draw(self))


class EdgeCounter:
    """Counts the edges of tiles exactly; only tiles that `block` calls PARTIAL are tested."""

    def __init__(self, mask: EdgeSet, sizes: Sizes):
        self.mask, self.sizes, self.tested = mask, sizes, 0
        row = torch.zeros(min(sizes.query, 1), dtype=torch.int64)
        column = torch.zeros(min(sizes.source, 1), dtype=torch.int64)
        # For some masks only an answer shows whether they vary over samples and heads.
        shape = mask._tile(row, column, sizes).shape
        self.lead = tuple(shape[:2]) if len(shape) == 4 else (1, 1)

    def count(self, top: int, bottom: int, left: int, right: int) -> int | Tensor:
        """Return the number of edges of a tile; (batch or 1, head or 1) where samples differ."""
        tall, wide = bottom - top, right - left
        if not tall or not wide:
            return 0
        tile = Tile(top, bottom, left, right, self.sizes.query, self.sizes.source)
        block = self.mask._block(tile)
        if block != Block.PARTIAL:
            return tall * wide if block else 0
        if tall <= TILE and wide <= TILE:
            return self._test(tile)
        down = (top, top + tall // 2, bottom) if tall > TILE else (top, bottom)
        across = (left, left + wide // 2, right) if wide > TILE else (left, right)
        parts = product(pairwise(down), pairwise(across))
        return sum(self.count(*rows, *columns) for rows, columns in parts)

    def _test(self, tile: Tile) -> int | Tensor:
        rows, columns = torch.arange(tile.top, tile.bottom), torch.arange(tile.left, tile.right)
        self.tested += len(rows) * len(columns) * self.lead[0] * self.lead[1]
        if self.tested > MAX_TESTED:
            raise self.mask._too_many(self.sizes)
        counted = self.mask._tile(rows, columns, self.sizes).sum((-2, -1))
        return counted if counted.dim() == 2 else int(counted)


def why(
    mask: EdgeSet, i: int, j: int, sizes: Sizes, sample: int | None = None, head: int | None = None
) -> str:
    """The verdict on an edge, and the parts that decide it."""
    i, j = position("i", i, sizes.query), position("j", j, sizes.source)
    mask.check(sizes)
    verdict = mask._explain(Edge(i, j, sizes, sample, head), False)
    lines = [f"query {i} may {'' if verdict.allowed else 'not '}read source {j}"]
    verb, other = ("allowed", "blocks") if verdict.allowed else ("blocked", "allows")
    lines += [f"- {verb} by {part.text}: {part.reason}" for part in verdict.deciding]
    lines += [f"- although {part.text} {other} it: {part.reason}" for part in verdict.contrary]
    return "\n".join(lines)


def summary(mask: EdgeSet) -> str:
    """The expression and a picture of it, for as many positions as its data has, or 8."""
    if mask._calls:
        # A user's function may fail for the sizes that would be drawn.
        return mask._short()
    query, source = default_sizes(mask)
    drawn = maps(mask, mask._sizes(query, source), None, None, cells=32)
    return f"{mask._short()}\n{picture(drawn)}"


def leaves(mask: EdgeSet) -> list[tuple[str, EdgeSet]]:
    """The distinct leaves that a mask is composed of, each with its text, from left to right.

    Of a mask that calls a user's function there are none: alone, the function may be asked about
    edges that the other parts decide.
    """
    found: dict[int, tuple[str, EdgeSet]] = {}
    stack, seen = ([] if mask._calls else [mask]), set[int]()
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        stack += reversed(part.children)
        if not part.children and all(part != other for _, other in found.values()):
            found[id(part)] = (part._brief(), part)
    return list(found.values())


def default_sizes(mask: EdgeSet) -> tuple[int, int]:
    """As many queries and sources as the mask's data has, or as it needs, or 8."""
    query, source = mask.own.query, mask.own.source
    if source is None:
        source = max(mask._least(), DEFAULT) if query is None else query
    return source if query is None else query, source


def picture(maps: list[Map]) -> str:
    """The text of some maps, with a legend where they have shades."""
    pieces = [str(each) for each in maps[:PICTURES]]
    if maps and not all(each.whole for each in maps):
        pieces.append(legend(maps[0]))
    if len(maps) > PICTURES:
        pieces.append(f"and {len(maps) - PICTURES} more: choose with sample= and head=")
    return "\n".join(pieces)


def maps(
    mask: EdgeSet, sizes: Sizes, sample: int | None, head: int | None, cells: int
) -> list[Map]:
    """The maps of the samples and heads that differ, or of the ones asked for."""
    if not isinstance(cells, int) or cells < 1:
        raise value_error("cells", "is a number of tiles a side, 1 or more", got=cells)
    mask.check(sizes)
    counter = EdgeCounter(mask, sizes)
    rows, columns = _cuts(sizes.query, cells), _cuts(sizes.source, cells)
    shares = _shares(counter, rows, columns)
    samples, heads = counter.lead
    return [
        Map(_name(b, h, samples, heads), rows, columns, shares[b, h].tolist())
        for b in _chosen("sample", sample, samples)
        for h in _chosen("head", head, heads)
    ]


def _shares(counter: EdgeCounter, rows: list[int], columns: list[int]) -> Tensor:
    counts = torch.zeros(*counter.lead, len(rows) - 1, len(columns) - 1, dtype=torch.float64)
    for r, c in product(range(len(rows) - 1), range(len(columns) - 1)):
        counted = counter.count(*rows[r : r + 2], *columns[c : c + 2])
        counts[..., r, c] = torch.as_tensor(counted)
    return counts / (torch.tensor(rows).diff()[:, None] * torch.tensor(columns).diff())


def draw(map_: Map) -> list[str]:
    """A map as lines of text, with the positions of its rows and columns."""
    starts, columns = map_.rows[:-1], map_.columns[:-1]
    if not starts or not columns:
        return [f"no edges: {map_.rows[-1]} queries, {map_.columns[-1]} sources"]
    width = len(str(starts[-1]))
    rows = zip(starts, map_.shares, strict=True)
    lines = [f"{start:>{width}} {' '.join(map(glyph, shares))}" for start, shares in rows]
    return _head(map_.columns, " " * (width + 1)) + lines


def _head(columns: list[int], margin: str) -> list[str]:
    """The lines of column numbers above a map."""
    count = len(columns) - 1
    if columns[-1] == count:
        return [(margin + line).rstrip() for line in _numbers(count)]
    last = str(columns[-1] - 1)
    gap = max(1, 2 * count - 2 - len(last))
    return [f"{margin}0{' ' * gap}{last}"]


def legend(map_: Map) -> str:
    """The line that explains the shades of a map."""
    tall, wide = (-(-bounds[-1] // max(len(bounds) - 1, 1)) for bounds in (map_.rows, map_.columns))
    return f"{LEGEND}  (of up to {tall} x {wide} edges)"


def glyph(share: float) -> str:
    """The sign for a share of allowed edges; the signs differ without colour."""
    if share <= 0:
        return NONE
    return ALL if share >= 1 else SHADES[min(int(share * 3), 2)]


def _cuts(size: int, cells: int) -> list[int]:
    cells = min(cells, size)
    return [size * cell // max(cells, 1) for cell in range(cells + 1)]


def _chosen(name: str, given: int | None, size: int) -> list[int]:
    if given is None:
        return list(range(size))
    return [0 if size == 1 else position(name, given, size)]


def _name(sample: int, head: int, samples: int, heads: int) -> str:
    words = [f"sample {sample}"] if samples > 1 else []
    return ", ".join(words + ([f"head {head}"] if heads > 1 else []))


def _numbers(size: int) -> list[str]:
    """Column numbers, one digit a line; the higher digits only where they change."""
    digits = len(str(size - 1))
    lines = []
    for power in range(digits - 1, -1, -1):
        step = 10**power
        shown = (n % step == 0 and (n >= step or step == 1) for n in range(size))
        lines.append(" ".join(str(n // step % 10) if show else " " for n, show in enumerate(shown)))
    return lines
