"""Masks of positions alone: every row is one interval of sources."""

# The methods are documented once, in EdgeSet and Mask.
# ruff: noqa: D102
from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from clearhead._core import is_number, type_error, value_error
from clearhead.masks.mask import Mask
from clearhead.masks.protocol import Block, Tile
from clearhead.masks.ranges import Interval, Ranges

if TYPE_CHECKING:
    from clearhead._core import Sizes

# Sums of a position and a distance stay in int64.
LARGEST = 2**53
Align = Literal["end", "start"] | int


def standing(align: Align, query: int, source: int) -> int:
    """The source position of query 0."""
    if isinstance(align, str):
        return source - query if align == "end" else 0
    return align


def named_align(align: Align, full: bool) -> str:
    """The argument in an expression; without `full` only where it is not the default."""
    if align == "end" and not full:
        return ""
    return f', align="{align}"' if isinstance(align, str) else f", align={align}"


class Everything(Mask):
    """All edges."""

    _made_of = ()

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return (i == i) & (j == j)

    def _text(self, full: bool) -> str:
        return "everything()"

    def _block(self, tile: Tile) -> Block:
        return Block.FULL

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        zero = torch.zeros_like(i)
        return zero, zero + sizes.source

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        return "it has every edge"


class Nothing(Mask):
    """No edge."""

    _made_of = ()

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return (i != i) & (j != j)

    def _text(self, full: bool) -> str:
        return "nothing()"

    def _block(self, tile: Tile) -> Block:
        return Block.EMPTY

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        zero = torch.zeros_like(i)
        return zero, zero

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        return "it has no edge"


class First(Mask):
    """Edges to the first n sources."""

    _made_of = ("name", "n")

    def __init__(self, name: str, n: int):
        self.name, self.n = name, n

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return (i == i) & (j < self.n)

    def _text(self, full: bool) -> str:
        return f"{self.name}({self.n})"

    def _block(self, tile: Tile) -> Block:
        if tile.left >= self.n:
            return Block.EMPTY
        return Block.FULL if tile.right <= self.n else Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        zero = torch.zeros_like(i)
        return zero, zero + min(self.n, sizes.source)

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        return f"source {j} is {'' if j < self.n else 'not '}among the first {self.n}"


class Relative(Mask):
    """Edges whose source lies from `low` to `high` positions after the query (None: any)."""

    _made_of = ("name", "low", "high", "align")
    relative = True

    def __init__(
        self, name: str, given: tuple[int, ...], low: int | None, high: int | None, align: Align
    ):
        self.name, self.given = name, given
        self.align: Align = align
        self.low, self.high = low, high

    def _offset(self, query: int, source: int) -> int:
        return standing(self.align, query, source)

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        after = j - (i + self._offset(sizes.query, sizes.source))
        if self.low is None:
            return after <= self.high
        if self.low == self.high:
            return after == self.low
        return (after >= self.low) & (after <= self.high)

    def _text(self, full: bool) -> str:
        given = "".join(f", {number}" for number in self.given) + named_align(self.align, full)
        return f"{self.name}({given.removeprefix(', ')})"

    def _block(self, tile: Tile) -> Block:
        offset = self._offset(tile.query, tile.source)
        least, most = tile.left - (tile.bottom - 1 + offset), tile.right - 1 - (tile.top + offset)
        low = least if self.low is None else self.low
        high = most if self.high is None else self.high
        if most < low or least > high:
            return Block.EMPTY
        return Block.FULL if low <= least and most <= high else Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        at = i + self._offset(sizes.query, sizes.source)
        start = torch.zeros_like(at) if self.low is None else at + self.low
        stop = torch.zeros_like(at) + sizes.source if self.high is None else at + self.high + 1
        return start, stop

    def ranges(self, query: int, source: int | None = None, most: int = 4) -> Ranges | None:
        return _ranges(self.low, self.high, self.align, query, source)

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        offset = self._offset(sizes.query, sizes.source)
        reader = f"query {i}" + (f" (at position {i + offset})" if offset else "")
        after = j - (i + offset)
        if not after:
            return f"source {j} is the position of {reader}"
        return f"source {j} lies {abs(after)} {'after' if after > 0 else 'before'} {reader}"


class Chunk(Mask):
    """Edges inside consecutive chunks of n positions."""

    _made_of = ("n", "align")

    def __init__(self, n: int, align: Align):
        self.n = n
        self.align: Align = align

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        at = i + standing(self.align, sizes.query, sizes.source)
        return at.div(self.n, rounding_mode="floor") == j // self.n

    def _text(self, full: bool) -> str:
        return f"chunk({self.n}{named_align(self.align, full)})"

    def _block(self, tile: Tile) -> Block:
        offset = standing(self.align, tile.query, tile.source)
        least, most = ((at + offset) // self.n for at in (tile.top, tile.bottom - 1))
        low, high = tile.left // self.n, (tile.right - 1) // self.n
        if high < least or most < low:
            return Block.EMPTY
        return Block.FULL if least == most == low == high else Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        at = i + standing(self.align, sizes.query, sizes.source)
        start = at.div(self.n, rounding_mode="floor") * self.n
        return start, start + self.n

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        chunk = (i + standing(self.align, sizes.query, sizes.source)) // self.n
        return f"query {i} lies in chunk {chunk} of {self.n}, source {j} in chunk {j // self.n}"


@lru_cache(maxsize=64)
def _ranges(
    low: int | None, high: int | None, align: Align, query: int, source: int | None
) -> Ranges | None:
    """The ranges of a relative mask: five tensor operations would cost more than a small call."""
    return Mask.ranges(Relative("", (), low, high, align), query, source)


def everything() -> Mask:
    """Every query may read every source.

    >>> print(everything().picture(2))
      0 1
    0 ■ ■
    1 ■ ■
    """
    return Everything()


def nothing() -> Mask:
    """No query may read anything.

    >>> print(nothing().picture(2))
      0 1
    0 · ·
    1 · ·
    """
    return Nothing()


def causal(align: Align = "end") -> Mask:
    """A query may read its own position and all before it: j <= i.

    >>> print(causal().picture(2, 4))
      0 1 2 3
    0 ■ ■ ■ ·
    1 ■ ■ ■ ■

    `align` places the queries among the sources: "end" puts the last query at the last source
    (right for a KV cache), "start" the first query at source 0 (torch's `is_causal`), and an
    integer is the position of the first query (for a cache that is not filled to its end).
    """
    return Relative("causal", (), None, 0, read_align(align))


def window(n: int, align: Align = "end") -> Mask:
    """A query may read the last n sources, its own position included: i - n < j <= i.

    >>> print(window(2).picture(4))
      0 1 2 3
    0 ■ · · ·
    1 ■ ■ · ·
    2 · ■ ■ ·
    3 · · ■ ■

    `align` as in `causal`.
    """
    hint = "nothing() allows no edge, causal() is a window without a limit"
    n = _whole("n", n, 1, "includes the position of the query, so it is at least 1", hint)
    return Relative("window", (n,), 1 - n, 0, read_align(align))


def chunk(n: int, align: Align = "end") -> Mask:
    """A query may read its own chunk of n positions: i // n == j // n (Llama 4, with `causal()`).

    >>> print((chunk(2) & causal()).picture(4))
      0 1 2 3
    0 ■ · · ·
    1 ■ ■ · ·
    2 · · ■ ·
    3 · · ■ ■

    Chunks are counted from source 0. `align` as in `causal`.
    """
    n = _whole("n", n, 1, "counts the positions of a chunk, so it is at least 1")
    return Chunk(n, read_align(align))


def band(before: int, after: int, align: Align = "end") -> Mask:
    """A query may read `before` positions back to `after` positions ahead, both included.

    >>> print(band(1, 1).picture(4))
      0 1 2 3
    0 ■ ■ · ·
    1 ■ ■ ■ ·
    2 · ■ ■ ■
    3 · · ■ ■

    `align` as in `causal`.
    """
    hint = "causal() and ~causal() have no limit; diagonal(distance) picks one distance"
    rule = "is a distance in positions, 0 or more"
    before = _whole("before", before, 0, rule, hint)
    after = _whole("after", after, 0, rule, hint)
    return Relative("band", (before, after), -before, after, read_align(align))


def diagonal(distance: int, align: Align = "end") -> Mask:
    """A query may read the one source `distance` positions back (ahead where negative).

    >>> print(diagonal(1).picture(4))
      0 1 2 3
    0 · · · ·
    1 ■ · · ·
    2 · ■ · ·
    3 · · ■ ·

    `align` as in `causal`.
    """
    distance = _whole("distance", distance, None)
    return Relative("diagonal", (distance,), -distance, -distance, read_align(align))


def first(n: int) -> Mask:
    """The edges to sources 0..n-1, as for attention sinks: `readings.Mass(masks.first(4))`.

    >>> print(first(1).picture(3))
      0 1 2
    0 ■ · ·
    1 ■ · ·
    2 ■ · ·

    The same edges as `prefix(n)`.
    """
    hint = "nothing() has no edge"
    return First("first", _whole("n", n, 1, "counts sources, so it is at least 1", hint))


def prefix(n: int) -> Mask:
    """Every query may read sources 0..n-1, as in a prefix language model: `causal() | prefix(n)`.

    >>> print((causal() | prefix(2)).picture(3))
      0 1 2
    0 ■ ■ ·
    1 ■ ■ ·
    2 ■ ■ ■

    The same edges as `first(n)`; 0 is an empty prefix.
    """
    return First("prefix", _whole("n", n, 0, "counts sources, so it is 0 or more"))


def read_align(align: Align) -> Align:
    """Check an alignment: "start", "end" or the position of the first query."""
    if not isinstance(align, str) and (is_number(align) or isinstance(align, torch.SymInt)):
        number: Any = align
        return _whole("align", number, None)
    if align not in ("end", "start"):
        raise value_error(
            "align",
            'is "end" (the last query at the last source), "start" (the first query at source 0) '
            "or the position of the first query, as an integer",
            got=repr(align),
        )
    return align


def _whole(
    name: str, value: int, least: int | None, rule: str = "", hint: str | None = None
) -> int:
    if not (is_number(value) or isinstance(value, torch.SymInt)):
        raise type_error(name, "takes an integer", got=repr(value))
    value = value if isinstance(value, torch.SymInt) else int(value)
    if least is not None and value < least:
        raise value_error(name, rule, got=value, hint=hint)
    if isinstance(value, int) and abs(value) > LARGEST:
        raise value_error(name, f"counts positions, at most {LARGEST}", got=value)
    return value
