"""Masks given edge by edge: the pairs of a list, or the answers of a user's function."""

# The methods are documented once, in EdgeSet and Mask.
# ruff: noqa: D102
from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core import captured_tensors, is_number, readable, type_error, value_error
from clearhead.masks.data import SHOWN
from clearhead.masks.mask import Mask
from clearhead.masks.positional import Align, named_align, read_align, standing
from clearhead.masks.protocol import Block, Own, Tile
from clearhead.masks.ranges import Interval, Ranges, ascend, tile_of_pairs

if TYPE_CHECKING:
    from clearhead._core import Sizes

# Tiles of fewer edges are tested edge by edge.
TESTED = 1 << 12
# Two positions below this are one int64.
LIMIT = 1 << 31
HINT = "one edge is edges([(3, 0)]): query 3 reads source 0; dense(tensor) takes a bool tensor"


class Listed(Mask):
    """The edges of a list, in positions of the sequence."""

    _made_of = ("codes", "align")

    def __init__(self, pairs: list[tuple[int, int]], align: Align):
        self.pairs = pairs  # ascending, each once
        self.last = pairs[-1][0], max(source for _, source in pairs)
        self.align: Align = align
        self.codes = torch.tensor([query * LIMIT + source for query, source in pairs])

    def to(self, device: torch.device | str) -> Mask:
        moved = Listed(self.pairs, self.align)
        moved.codes = self.codes.to(device)
        return moved

    def check(self, sizes: Sizes) -> None:
        stop = sizes.query + standing(self.align, sizes.query, sizes.source)
        if self.last[0] < stop and self.last[1] < sizes.source:
            return
        for query, source in self.pairs:
            if query >= stop or source >= sizes.source:
                raise value_error(
                    "mask",
                    f"edges: ({query}, {source}) lies beyond the positions of the call",
                    got=f"queries up to {stop - 1}, sources up to {sizes.source - 1}",
                    shapes={"call (query, source)": (sizes.query, sizes.source)},
                    hint="positions count from 0, query first",
                )

    def _least(self) -> int:
        return 1 + max(self.last)

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        wanted = (i + standing(self.align, sizes.query, sizes.source)) * LIMIT + j
        codes = self.codes.to(j.device)
        found = torch.searchsorted(codes, wanted).clamp(max=len(self.pairs) - 1)
        return codes[found] == wanted

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        few = not readable(rows) or rows.numel() * columns.numel() < TESTED
        if few or not (ascend(rows) and ascend(columns)):
            return super()._tile(rows, columns, sizes, within)
        offset = standing(self.align, sizes.query, sizes.source)
        codes = self._between(int(rows[0]) + offset, int(rows[-1]) + 1 + offset).to(rows.device)
        return tile_of_pairs(codes // LIMIT - offset, codes % LIMIT, rows, columns)

    def _between(self, first: int, last: int) -> Tensor:
        """The codes of the edges of some positions."""
        bounds = torch.tensor([first, last], device=self.codes.device) * LIMIT
        start, stop = torch.searchsorted(self.codes, bounds).tolist()
        return self.codes[start:stop]

    def sources(self, queries: range, sizes: Sizes) -> Tensor:
        offset = standing(self.align, sizes.query, sizes.source)
        return (self._between(queries.start + offset, queries.stop + offset) % LIMIT).unique()

    def _text(self, full: bool) -> str:
        few = 2 * len(self.pairs) <= SHOWN
        listed = str(self.pairs) if few else f"<{len(self.pairs)} pairs>"
        return f"edges({listed}{named_align(self.align, full)})"

    def _block(self, tile: Tile) -> Block:
        offset = standing(self.align, tile.query, tile.source)
        rows = (bisect_left(self.pairs, (row + offset, 0)) for row in (tile.top, tile.bottom))
        inside = sum(tile.left <= source < tile.right for _, source in self.pairs[slice(*rows)])
        if not inside:
            return Block.EMPTY
        area = (tile.bottom - tile.top) * (tile.right - tile.left)
        return Block.FULL if inside == area else Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        first: dict[int, int] = {}
        stop: dict[int, int] = {}
        for query, source in self.pairs:
            if stop.get(query, source) != source:
                return None
            first.setdefault(query, source)
            stop[query] = source + 1
        known, low, high = (
            torch.tensor([*values], device=i.device)
            for values in (first, first.values(), stop.values())
        )
        wanted = i + standing(self.align, sizes.query, sizes.source)
        at = torch.searchsorted(known, wanted).clamp(max=len(first) - 1)
        there = known[at] == wanted
        return torch.where(there, low[at], 0), torch.where(there, high[at], 0)

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        at = i + standing(self.align, sizes.query, sizes.source)
        count = f"{len(self.pairs)} edge{'s' * (len(self.pairs) > 1)}"
        return f"({at}, {j}) is {'' if (at, j) in self.pairs else 'not '}among its {count}"


def edges(pairs: Iterable[tuple[int, int]] | Tensor, align: Align = "end") -> Mask:
    """Exactly these edges: (query, source) pairs, in positions of the whole sequence.

    >>> print(edges([(3, 0), (3, 1)]).picture(4))
      0 1 2 3
    0 · · · ·
    1 · · · ·
    2 · · · ·
    3 ■ ■ · ·
    >>> edges([(3, 0)]).row(0, query=1, source=4)  # one step with a cache: its query is number 3
    [0]

    Positions count from 0. Queries of an earlier step of a cache are no edges of the call;
    positions beyond it are a ValueError. `align` as in `causal`; in cross-attention, whose queries
    have positions of their own, it is "start".
    """
    found = sorted({_pair(pair) for pair in _listed(pairs)})
    if not found:
        raise value_error("pairs", "needs an edge", got="none", hint="nothing() has no edge")
    return Listed(found, read_align(align))


def _listed(pairs: Any) -> list[Any]:
    if isinstance(pairs, Tensor) and pairs.dim() == 2:
        return pairs.tolist()
    if isinstance(pairs, str | bytes | Tensor | dict) or not isinstance(pairs, Iterable):
        got = f"shape {tuple(pairs.shape)}" if isinstance(pairs, Tensor) else repr(pairs)
        raise type_error("pairs", "is a list of (query, source) pairs", got=got, hint=HINT)
    return list(pairs)


def _pair(pair: Any) -> tuple[int, int]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise type_error("pairs", "is a list of (query, source) pairs", got=repr(pair), hint=HINT)
    for number in pair:
        if not is_number(number):
            raise type_error("pairs", "holds positions, as integers", got=repr(tuple(pair)))
        if not 0 <= int(number) < LIMIT:
            hint = "the number of positions is not known here, so none can be counted from the end"
            rule = f"holds positions counted from 0, up to {LIMIT - 1}"
            raise value_error("pairs", rule, got=tuple(pair), hint=hint)
    return int(pair[0]), int(pair[1])


class Intervals(Mask):
    """One interval of sources for each query, which lies inside of the sources."""

    def __init__(self, given: Ranges):
        self.given = given
        self.start, self.stop = given.start[0].long(), given.stop[0].long()
        batch, head, query = self.start.shape
        self.own = Own(batch, head, query)

    def ranges(self, query: int, source: int | None = None, most: int = 4) -> Ranges:
        """Return the ranges that it was made from."""
        return self.given

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        at = (b % self.start.shape[0], h % self.start.shape[1], i)
        return (self.start[at] <= j) & (j < self.stop[at])

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval:
        return self.start[..., i], self.stop[..., i]

    def _text(self, full: bool) -> str:
        return "intervals(...)"


def from_ranges(ranges: Ranges) -> Mask:
    """Make a mask of ranges that have one interval for each query."""
    return Intervals(ranges)


class Packed(Mask):
    """One interval of sources for each query of packed sequences, whose sizes are fixed."""

    _made_of = ("text", "start", "stop")

    def __init__(self, text: str, start: Tensor, stop: Tensor, source: int):
        self.text, self.start, self.stop = text, start, stop
        self.own = Own(query=len(start), source=source)

    def to(self, device: torch.device | str) -> Mask:
        return Packed(self.text, self.start.to(device), self.stop.to(device), self.own.source or 0)

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        start, stop = (x.to(i.device)[i] for x in (self.start, self.stop))
        return (start <= j) & (j < stop)

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval:
        return self.start.to(i.device)[i], self.stop.to(i.device)[i]

    def _block(self, tile: Tile) -> Block:
        rows = slice(tile.top, tile.bottom)
        start, stop = self.start[rows], self.stop[rows]
        if not readable(start) or start.device.type != "cpu":
            return Block.PARTIAL
        if not ((start < tile.right) & (stop > tile.left) & (start < stop)).any():
            return Block.EMPTY
        inside = (start <= tile.left) & (stop >= tile.right)
        return Block.FULL if inside.all() else Block.PARTIAL

    def _text(self, full: bool) -> str:
        return self.text

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        start, stop = int(self.start[i]), int(self.stop[i])
        if start >= stop:
            return f"query {i} has no source in its sequence"
        return f"query {i} may read sources {start} to {stop - 1}"


class Tiles(Mask):
    """Whole tiles of edges, as the block structure of a FlexAttention BlockMask lists them."""

    _made_of = ("tiles", "size")

    def __init__(self, tiles: Tensor, size: tuple[int, int], own: Own):
        # (tile row, tile column), or (batch, head, tile row, tile column)
        self.tiles, self.size, self.own = tiles, size, own

    def to(self, device: torch.device | str) -> Mask:
        return Tiles(self.tiles.to(device), self.size, self.own)

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        tiles, (height, width) = self.tiles.to(i.device), self.size
        lead = (b % tiles.shape[0], h % tiles.shape[1]) if tiles.dim() == 4 else ()
        return tiles[(*lead, i // height, j // width)]

    def _text(self, full: bool) -> str:
        return f"tiles(<{tuple(self.tiles.shape)} of {self.size}>)"

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        height, width = self.size
        return f"query {i} and source {j} lie in tile ({i // height}, {j // width})"


class Where(Mask):
    """The edges for which a function returns True."""

    _made_of = ("function", "align")
    _calls = True

    def __init__(self, function: Callable[..., Tensor], align: Align):
        self.function = function
        self.align: Align = align

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        answer = self.function(b, h, i + standing(self.align, sizes.query, sizes.source), j)
        if isinstance(answer, bool):
            answer = torch.full_like(i, answer, dtype=torch.bool)
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
            kind = answer.dtype if isinstance(answer, Tensor) else type(answer).__name__
            raise type_error(
                "function", "returns True or False for one edge, as a bool tensor", got=kind
            )
        return answer

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        shape = (sizes.batch, sizes.head, rows.shape[0], columns.shape[0])
        if not all(shape):
            return torch.zeros(shape[2:], dtype=torch.bool, device=rows.device)
        i, j = rows[:, None].expand(shape[2:]), columns.expand(shape[2:])
        if within is not None:
            return self._select(i, j, sizes, within)
        return _narrow(self._map(i, j, sizes, shared=True))

    def _select(self, i: Tensor, j: Tensor, sizes: Sizes, within: Tensor) -> Tensor:
        """Call the function for edges in `within` only: the others repeat one, and are dropped."""
        if readable(within) and not within.any():
            return within
        if within.dim() == 4:
            i, j = (x.expand(sizes.batch, sizes.head, *x.shape) for x in (i, j))
            within = within.expand_as(i)
            one = within.flatten(-2).to(torch.uint8).argmax(-1)[..., None]
            some = within.flatten(-2).any(-1)[..., None, None]
            i, j = (
                torch.where(within, x, x.flatten(-2).gather(-1, one)[..., None]) for x in (i, j)
            )
            # A sample without any edge borrows one from another sample.
            flat = within.flatten().to(torch.uint8).argmax()[None]
            i, j = (torch.where(some, x, x.flatten().gather(0, flat)) for x in (i, j))
            return self._map(i, j, sizes, shared=False) & within
        one = within.flatten().to(torch.uint8).argmax()[None]
        i, j = (torch.where(within, x, x.flatten().gather(0, one)) for x in (i, j))
        return _narrow(self._map(i, j, sizes, shared=True)) & within

    def _map(self, i: Tensor, j: Tensor, sizes: Sizes, *, shared: bool) -> Tensor:
        """Call it for one edge at a time, as FlexAttention does; positions may vary by sample."""
        mapped = torch.vmap(torch.vmap(self._one(sizes), (None, None, 0, 0)), (None, None, 0, 0))
        place = None if shared else 0
        mapped = torch.vmap(torch.vmap(mapped, (None, 0, place, place)), (0, None, place, place))
        b = torch.arange(sizes.batch, device=i.device)
        return mapped(b, torch.arange(sizes.head, device=i.device), i, j)

    def _one(self, sizes: Sizes) -> Callable[..., Tensor]:
        """The function for one edge, with an error that names it."""

        def one(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            try:
                return self._at(b, h, i, j, sizes)
            except IndexError as error:
                raise value_error(
                    "function",
                    f"{self._short()} reads beyond its own data ({error})",
                    shapes={"(query, source)": (sizes.query, sizes.source)},
                    hint="block those edges with another mask: causal() & where(function) calls "
                    "it for allowed edges only",
                ) from error

        return one

    def tensors(self) -> list[Tensor]:
        return captured_tensors(self.function)

    def _text(self, full: bool) -> str:
        align = "" if self.align == "start" else named_align(self.align, True)
        return f"where({getattr(self.function, '__name__', type(self.function).__name__)}{align})"

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        b_, h_, i_, j_ = (torch.tensor(x) for x in (b, h, i, j))
        return f"the function returns {bool(self._at(b_, h_, i_, j_, sizes))}"


def _narrow(edges: Tensor) -> Tensor:
    """Drop the batch and head axes along which a mapped function has one answer (stride 0)."""
    for axis in (0, 1):
        if edges.shape[axis] > 1 and edges.stride(axis) == 0:
            edges = edges.narrow(axis, 0, 1)
    return edges[0, 0] if edges.shape[:2] == (1, 1) else edges


def where(
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], align: Align = "start"
) -> Mask:
    """The edges for which `function(batch, head, query, source)` is True: a FlexAttention mask_mod.

    >>> print(where(lambda b, h, q, k: (q - k) % 2 == 0).picture(3))
      0 1 2
    0 ■ · ■
    1 · ■ ·
    2 ■ · ■

    It is called for one edge at a time (through `torch.vmap`) with 0-dimensional int64 tensors,
    and returns a bool tensor. It is never called with positions out of range, nor, in
    `other & where(function)`, with edges that `other` blocks.

    `align` says from where queries are counted: "start" gives the number of the query in the call,
    as FlexAttention does; "end" its position in a sequence whose last query stands at the last
    source, as in `causal`, which is right while decoding with a KV cache; an integer is the
    position of the first query.
    """
    if not callable(function):
        raise type_error(
            "function", "takes a function of four positions", got=type(function).__name__
        )
    if not torch.compiler.is_compiling():
        _takes_four(function)
    return Where(function, read_align(align))


def _takes_four(function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind(0, 0, 0, 0)
    except TypeError as error:
        rule = f"takes (batch, head, query, source), as a mask_mod does ({error})"
        raise type_error("function", rule) from None
    except ValueError:
        # Some built-in functions have no signature.
        return
