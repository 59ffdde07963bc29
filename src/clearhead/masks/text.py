"""A mask in words and as a picture: the data of both first, then their text."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING, NamedTuple

import torch

from clearhead._core import value_error
from clearhead.masks.algebra import Minus, Not, Or, Pair
from clearhead.masks.mask import Mask, pick, position
from clearhead.masks.tally import Tally

if TYPE_CHECKING:
    from clearhead._core import Sizes

NONE, ALL = "·", "■"
# Shares of a tile: under a third, under two thirds, less than all.
SHADES = "░▒▓"
LEGEND = f"{NONE} none  {SHADES[0]} under 1/3  {SHADES[1]} under 2/3  {SHADES[2]} more  {ALL} all"
# How many samples and heads of a mask that varies are drawn unless one is asked for.
PICTURES = 4
# Without sizes, a mask is drawn for this many positions.
DEFAULT = 8


class Part(NamedTuple):
    """A leaf of a composed mask and what it says about an edge."""

    text: str
    reason: str
    allows: bool


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


def why(
    mask: Mask, i: int, j: int, sizes: Sizes, sample: int | None = None, head: int | None = None
) -> str:
    """The verdict on an edge, and the parts that decide it."""
    i, j = position("i", i, sizes.query), position("j", j, sizes.source)
    mask.check(sizes)
    allowed, decisive, contrary = _explain(mask, (i, j, sizes, sample, head), False)
    lines = [f"query {i} may {'' if allowed else 'not '}read source {j}"]
    verb, other = ("allowed", "blocks") if allowed else ("blocked", "allows")
    lines += [f"- {verb} by {part.text}: {part.reason}" for part in decisive]
    lines += [f"- although {part.text} {other} it: {part.reason}" for part in contrary]
    return "\n".join(lines)


def _explain(
    mask: Mask, edge: tuple[int, int, Sizes, int | None, int | None], negated: bool
) -> tuple[bool, list[Part], list[Part]]:
    """Whether the (negated) mask allows the edge, and the parts for and against that verdict."""
    if isinstance(mask, Not):
        return _explain(mask.inner, edge, not negated)
    if not isinstance(mask, Pair):
        return _leaf(mask, edge, negated)
    both = isinstance(mask, Or) == negated  # whether both sides have to allow the edge
    flips = (negated, negated != isinstance(mask, Minus))
    order = sorted(((mask.left, flips[0]), (mask.right, flips[1])), key=lambda side: side[0]._calls)
    first = _explain(order[0][0], edge, order[0][1])
    if order[1][0]._calls and first[0] != both:
        return first  # a function is not asked about edges that are decided without it
    second = _explain(order[1][0], edge, order[1][1])
    found = (first, second) if order[0][0] is mask.left else (second, first)
    allowed = all(side[0] for side in found) if both else any(side[0] for side in found)
    agree = [side for side in found if side[0] == allowed]
    against = [part for side in found if side[0] != allowed for part in side[1]]
    if len(agree) == 2:
        against = agree[0][2] + agree[1][2]
    return allowed, [part for side in agree for part in side[1]], against


def _leaf(
    mask: Mask, edge: tuple[int, int, Sizes, int | None, int | None], negated: bool
) -> tuple[bool, list[Part], list[Part]]:
    i, j, sizes, sample, head = edge
    tile = mask._tile(torch.tensor([i]), torch.tensor([j]), sizes)
    allows = bool(pick(mask, tile, sample, head)) != negated
    reason = mask._reason((sample or 0), (head or 0), i, j, sizes)
    text = f"~{mask._short()}" if negated else mask._short()
    return allows, [Part(text, reason, allows)], []


def summary(mask: Mask) -> str:
    """The expression and a picture of it, for as many positions as its data has, or 8."""
    if mask._calls:
        return mask._short()  # a function may not be made for the sizes that would be drawn
    query, source = default_sizes(mask)
    return f"{mask._short()}\n{mask.picture(query, source)}"


def default_sizes(mask: Mask) -> tuple[int, int]:
    """As many queries and sources as the mask's data has, or as it needs, or 8."""
    query, source = mask.own.query, mask.own.source
    if source is None:
        source = max(mask._least(), DEFAULT) if query is None else query
    return source if query is None else query, source


def picture(maps: list[Map]) -> str:
    """The text of some maps, with what their signs mean where that is not plain."""
    pieces = [str(each) for each in maps[:PICTURES]]
    if maps and not all(each.whole for each in maps):
        pieces.append(legend(maps[0]))
    if len(maps) > PICTURES:
        pieces.append(f"and {len(maps) - PICTURES} more: choose with sample= and head=")
    return "\n".join(pieces)


def maps(mask: Mask, sizes: Sizes, sample: int | None, head: int | None, cells: int) -> list[Map]:
    """The maps of the samples and heads that differ, or of the ones asked for."""
    if not isinstance(cells, int) or cells < 1:
        raise value_error("cells", "is a number of tiles a side, 1 or more", got=cells)
    mask.check(sizes)
    tally = Tally(mask, sizes)
    rows, columns = _edges(sizes.query, cells), _edges(sizes.source, cells)
    counts = torch.zeros(*tally.lead, len(rows) - 1, len(columns) - 1, dtype=torch.float64)
    for r, c in product(range(len(rows) - 1), range(len(columns) - 1)):
        counts[..., r, c] = torch.as_tensor(tally.count(*rows[r : r + 2], *columns[c : c + 2]))
    area = torch.tensor(rows).diff()[:, None] * torch.tensor(columns).diff()
    samples, heads = tally.lead
    return [
        Map(_name(b, h, samples, heads), rows, columns, (counts[b, h] / area).tolist())
        for b in _chosen("sample", sample, samples)
        for h in _chosen("head", head, heads)
    ]


def draw(map_: Map) -> list[str]:
    """A map as lines of text, with the positions of its rows and columns."""
    starts, columns = map_.rows[:-1], map_.columns[:-1]
    if not starts or not columns:
        return [f"no edges: {map_.rows[-1]} queries, {map_.columns[-1]} sources"]
    width = len(str(starts[-1]))
    margin = " " * width + " "
    if map_.columns[-1] == len(columns):
        head = [(margin + line).rstrip() for line in _numbers(len(columns))]
    else:
        last = str(map_.columns[-1] - 1)
        gap = max(1, 2 * len(columns) - 2 - len(last))
        head = [f"{margin}0{' ' * gap}{last}"]
    rows = zip(starts, map_.shares, strict=True)
    return head + [f"{start:>{width}} {' '.join(map(glyph, shares))}" for start, shares in rows]


def legend(map_: Map) -> str:
    """What the shades of a map mean."""
    tall, wide = (-(-bounds[-1] // max(len(bounds) - 1, 1)) for bounds in (map_.rows, map_.columns))
    return f"{LEGEND}  (of up to {tall} x {wide} edges)"


def glyph(share: float) -> str:
    """The sign for a share of allowed edges; the signs differ without colour."""
    if share <= 0:
        return NONE
    return ALL if share >= 1 else SHADES[min(int(share * 3), 2)]


def _edges(size: int, cells: int) -> list[int]:
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
