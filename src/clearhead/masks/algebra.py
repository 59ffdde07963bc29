"""The masks that `& | - ~` make."""

# The methods are documented once, in Mask.
# ruff: noqa: D102
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core import value_error
from clearhead.masks.mask import Block, Mask, Own, how_many, readable
from clearhead.masks.ranges import Interval, complement, intersection, tidy

if TYPE_CHECKING:
    from clearhead._core import Sizes


class Pair(Mask):
    """Two masks joined by an operator."""

    _made_of = ("left", "right")
    _sign = ""

    def __init__(self, left: Mask, right: Mask):
        self.left, self.right = left, right
        self.own = _agree(self, left, right)
        self._calls = left._calls or right._calls

    def to(self, device: torch.device | str) -> Mask:
        left, right = self.left.to(device), self.right.to(device)
        return self if left is self.left and right is self.right else type(self)(left, right)

    def check(self, sizes: Sizes) -> None:
        self.left.check(sizes)
        self.right.check(sizes)

    def _least(self) -> int:
        return max(self.left._least(), self.right._least())

    def _text(self, full: bool) -> str:
        left, right = self.left._text(full), self.right._text(full)
        left = f"({left})" if self.left._rank < self._rank else left
        right = f"({right})" if self.right._rank <= self._rank else right
        return f"{left} {self._sign} {right}"


class And(Pair):
    """The edges in both."""

    _sign, _rank = "&", 1

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return self.left._at(b, h, i, j, sizes) & self.right._at(b, h, i, j, sizes)

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        # A user's function is asked last, and only about edges that the other side allows.
        first, last = (self.right, self.left) if self.left._calls else (self.left, self.right)
        edges = first._tile(rows, columns, sizes, within)
        if last._calls:
            within = edges if within is None else edges & within
        return edges & last._tile(rows, columns, sizes, within)

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        tile = (top, bottom, left, right, query, source)
        first = self.left._block(*tile)
        return first and Block(min(first, self.right._block(*tile)))

    def _intervals(self, i: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        left, right = self.left._intervals(i, sizes), self.right._intervals(i, sizes)
        if left is None or right is None:
            return None
        return torch.maximum(left[0], right[0]), torch.minimum(left[1], right[1])

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[Interval] | None:
        left = self.left._ranges(i, sizes, most)
        right = None if left is None else self.right._ranges(i, sizes, most)
        if left is None or right is None or len(left) * len(right) > most:
            return None
        return intersection(left, right)


class Or(Pair):
    """The edges in one or both."""

    _sign, _rank = "|", 0

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return self.left._at(b, h, i, j, sizes) | self.right._at(b, h, i, j, sizes)

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        first, last = (self.right, self.left) if self.left._calls else (self.left, self.right)
        edges = first._tile(rows, columns, sizes, within)
        if last._calls:
            within = ~edges if within is None else within & ~edges
        return edges | last._tile(rows, columns, sizes, within)

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        tile = (top, bottom, left, right, query, source)
        first = self.left._block(*tile)
        return first if first == Block.FULL else Block(max(first, self.right._block(*tile)))

    def _intervals(self, i: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        left, right = self.left._intervals(i, sizes), self.right._intervals(i, sizes)
        if left is None or right is None:
            return None
        (a, b), (c, d) = tidy(*left, sizes.source), tidy(*right, sizes.source)
        touching = (torch.maximum(a, c) <= torch.minimum(b, d)) | (a == b) | (c == d)
        if not readable(touching) or not touching.all():
            return None
        start = torch.where(a == b, c, torch.where(c == d, a, torch.minimum(a, c)))
        return start, torch.where(a == b, d, torch.where(c == d, b, torch.maximum(b, d)))

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[Interval] | None:
        left = self.left._ranges(i, sizes, most)
        right = None if left is None else self.right._ranges(i, sizes, most)
        if left is None or right is None:
            return None
        joined = super()._ranges(i, sizes, most)
        union = left + right if joined is None else joined
        return union if len(union) <= most else None


class Not(Mask):
    """All other edges."""

    _made_of = ("inner",)
    _rank = 3

    def __init__(self, inner: Mask):
        self.inner, self.own, self._calls = inner, inner.own, inner._calls

    def to(self, device: torch.device | str) -> Mask:
        inner = self.inner.to(device)
        return self if inner is self.inner else Not(inner)

    def check(self, sizes: Sizes) -> None:
        self.inner.check(sizes)

    def _least(self) -> int:
        return self.inner._least()

    def _text(self, full: bool) -> str:
        text = self.inner._text(full)
        return f"~({text})" if self.inner._rank < self._rank else f"~{text}"

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return ~self.inner._at(b, h, i, j, sizes)

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        return ~self.inner._tile(rows, columns, sizes, within)

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        return Block(2 - self.inner._block(top, bottom, left, right, query, source))

    def _intervals(self, i: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        found = self.inner._intervals(i, sizes)
        if found is None:
            return None
        start, stop = tidy(*found, sizes.source)
        empty, last = start == stop, stop == sizes.source
        one_side = empty | last | (start == 0)
        if not readable(one_side) or not one_side.all():
            return None
        zero = torch.zeros_like(start)
        begin = torch.where(empty | last, zero, stop)
        end = torch.where(last & ~empty, start, zero + sizes.source)
        return begin, end

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[Interval] | None:
        found = self.inner._ranges(i, sizes, most)
        return complement(found[0], sizes.source) if found and len(found) == 1 else None


class Minus(Pair):
    """The edges of the first that are not in the second."""

    _sign, _rank = "-", 2

    def __init__(self, left: Mask, right: Mask):
        super().__init__(left, right)
        self._both = And(left, Not(right))

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return self._both._at(b, h, i, j, sizes)

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        return self._both._tile(rows, columns, sizes, within)

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        return self._both._block(top, bottom, left, right, query, source)

    def _intervals(self, i: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        return self._both._intervals(i, sizes)

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[Interval] | None:
        return self._both._ranges(i, sizes, most)


def compose(kind: type[Pair], left: Mask | Tensor, right: Mask | Tensor) -> Any:
    """Join two masks; a bool tensor counts as `dense(tensor)`."""
    from clearhead.masks.make import dense

    sides = [dense(side) if isinstance(side, Tensor) else side for side in (left, right)]
    if not all(isinstance(side, Mask) for side in sides):
        return NotImplemented
    return kind(*sides)


def _agree(whole: Pair, left: Mask, right: Mask) -> Own:
    """The sizes that two masks fix together."""
    sizes = []
    for name in Own._fields:
        a, b = getattr(left.own, name), getattr(right.own, name)
        loose = (None, 1) if name in ("batch", "head") else (None,)
        if a not in loose and b not in loose and a != b:
            raise value_error(
                "mask",
                f"{left._brief()} is made for {how_many(a, name)}, {right._brief()} for {b}",
                shapes={
                    "left  (batch, head, query, source)": left.own,
                    "right (batch, head, query, source)": right.own,
                },
                hint="compose masks made from the data of the same call",
            )
        sizes.append(b if a in loose and b is not None else a)
    return Own(*sizes)
