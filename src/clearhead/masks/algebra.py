"""The masks that the operators `& | - ~` make."""

# The methods are documented once, in EdgeSet and Mask.
# ruff: noqa: D102
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core import value_error
from clearhead.masks.data import dense
from clearhead.masks.mask import Mask
from clearhead.masks.protocol import (
    AXES,
    WRITTEN,
    Block,
    Edge,
    Own,
    Tile,
    Verdict,
    by_parts,
    how_many,
)
from clearhead.masks.ranges import Interval, complement, intersection, other_side, tidy, union

if TYPE_CHECKING:
    from clearhead._core import Sizes


ASKED = {
    "_at", "_block", "_explain", "_intervals", "_least", "_ranges", "_text", "_tile",
    "check", "sources", "tensors", "to",
}  # fmt: skip


class Composite(Mask):
    """A mask made of others, which it asks in the order of its parts where there are many."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        for name in ASKED & vars(cls).keys():
            setattr(cls, name, by_parts(vars(cls)[name]))

    def _compose(self, *children: Mask) -> None:
        self.children = children
        self._calls = any(child._calls for child in children)
        self.weight = sum(child.weight for child in children)
        around = [child.depth for child in children if child._calls]
        self.depth = 1 + max(around) if around else 0

    def with_children(self, children: list[Any]) -> Any:
        """The same operator on other masks."""
        return type(self)(*children)

    def __eq__(self, other: object) -> bool:
        stack: list[tuple[Any, Any]] = [(self, other)]
        seen: set[tuple[int, int]] = set()
        while stack:
            one, two = stack.pop()
            if one is two or (id(one), id(two)) in seen:
                continue
            seen.add((id(one), id(two)))
            if not isinstance(one, Mask) or type(one) is not type(two):
                return False
            stack += zip(one.children, two.children, strict=True)
            if not one.children and one != two:
                return False
        return True

    @by_parts
    def __hash__(self) -> int:
        return hash((type(self), *map(hash, self.children)))

    def __reduce__(self) -> Any:
        # As a list: copy and pickle would go down as deep as it is nested.
        return _composed, (_flat(self),)


def _flat(root: Composite) -> list[Any]:
    """The distinct parts, parts before wholes; a composite as its type and their numbers."""
    found: list[Any] = []
    numbers: dict[int, int] = {}
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        part, ready = stack.pop()
        if part.children and not ready and id(part) not in numbers:
            stack += [(part, True), *((child, False) for child in part.children)]
        elif id(part) not in numbers:
            numbers[id(part)] = len(found)
            inside = tuple(numbers[id(child)] for child in part.children)
            found.append((type(part), inside) if inside else part)
    return found


def _composed(parts: list[Any]) -> Any:
    """The composite that `_flat` wrote as a list."""
    made: list[Any] = []
    for part in parts:
        made.append(part[0](*(made[n] for n in part[1])) if isinstance(part, tuple) else part)
    return made[-1]


class Pair(Composite):
    """Two masks joined by an operator."""

    _made_of = ("left", "right")
    _sign = ""
    _either = False  # whether an edge in one side is enough
    _negates_right = False

    def __init__(self, left: Mask, right: Mask):
        self.left, self.right = left, right
        self._compose(left, right)
        self.own = Own(*(_agreed(name, left, right) for name in Own._fields))

    @classmethod
    def of(cls, left: Mask | Tensor, right: Mask | Tensor) -> Any:
        """Join two masks; a bool tensor counts as `dense(tensor)`."""
        sides = [dense(side) if isinstance(side, Tensor) else side for side in (left, right)]
        return cls(*sides) if all(isinstance(side, Mask) for side in sides) else NotImplemented

    def to(self, device: torch.device | str) -> Mask:
        left, right = self.left.to(device), self.right.to(device)
        return self if left is self.left and right is self.right else type(self)(left, right)

    def check(self, sizes: Sizes) -> None:
        self.left.check(sizes)
        self.right.check(sizes)

    def tensors(self) -> list[Tensor]:
        return list({id(x): x for side in self.children for x in side.tensors()}.values())

    def _least(self) -> int:
        return max(self.left._least(), self.right._least())

    def _text(self, full: bool) -> str:
        if self.weight > WRITTEN:
            return f"<{self.weight:,} masks composed>"
        left, right = self.left._text(full), self.right._text(full)
        left = f"({left})" if self.left._rank < self._rank else left
        right = f"({right})" if self.right._rank <= self._rank else right
        return f"{left} {self._sign} {right}"

    def _ordered(self) -> tuple[Mask, Mask]:
        """Both sides; one that calls a user's function comes last, on edges that it decides."""
        return (self.right, self.left) if self.left._calls else (self.left, self.right)

    def _explain(self, edge: Edge, negated: bool) -> Verdict:
        # ~(a | b) is ~a & ~b: both sides have to allow the edge.
        both = self._either == negated
        sides = [(self.left, negated), (self.right, negated != self._negates_right)]
        step = -1 if self.left._calls and not self.right._calls else 1
        (first, flip), (last, flip_last) = sides[::step]
        verdict = first._explain(edge, flip)
        if last._calls and verdict.allowed != both:
            # A user's function is not asked about edges that are decided without it.
            return verdict
        return _joined([verdict, last._explain(edge, flip_last)][::step], both)


def _joined(found: list[Verdict], both: bool) -> Verdict:
    """The verdict of two sides, both of which must allow the edge, or one."""
    allowed = (all if both else any)(side.allowed for side in found)
    agree = [side for side in found if side.allowed == allowed]
    against = [part for side in found if side.allowed != allowed for part in side.deciding]
    if len(agree) == 2:
        against = agree[0].contrary + agree[1].contrary
    deciding = [part for side in agree for part in side.deciding]
    # A part that is used twice says the same twice.
    return Verdict(allowed, list(dict.fromkeys(deciding)), list(dict.fromkeys(against)))


def _agreed(name: str, left: Mask, right: Mask) -> int | None:
    """The size of one axis that two masks fix together."""
    a, b = getattr(left.own, name), getattr(right.own, name)
    loose = (None, 1) if name in ("batch", "head") else (None,)
    if a not in loose and b not in loose and a != b:
        raise value_error(
            "mask",
            f"{left._brief()} is made for {how_many(a, name)}, {right._brief()} for {b}",
            shapes={f"left  {AXES}": left.own, f"right {AXES}": right.own},
            hint="compose masks made from the data of the same call",
        )
    return b if a in loose and b is not None else a


class And(Pair, sign="&"):
    """The edges in both."""

    _rank = 1

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return self.left._at(b, h, i, j, sizes) & self.right._at(b, h, i, j, sizes)

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        # A user's function is asked last, and only about edges that the other side allows.
        first, last = self._ordered()
        edges = first._tile(rows, columns, sizes, within)
        if last._calls:
            within = edges if within is None else edges & within
        return edges & last._tile(rows, columns, sizes, within)

    def _block(self, tile: Tile) -> Block:
        first = self.left._block(tile)
        return first and Block(min(first, self.right._block(tile)))

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        left, right = self.left._intervals(i, sizes), self.right._intervals(i, sizes)
        if left is None or right is None:
            return None
        return intersection([left], [right])[0]

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[Interval] | None:
        left = self.left._ranges(i, sizes, most)
        right = None if left is None else self.right._ranges(i, sizes, most)
        if left is None or right is None or len(left) * len(right) > most:
            return None
        return intersection(left, right)

    def sources(self, queries: range, sizes: Sizes) -> Tensor | None:
        sides = [side.sources(queries, sizes) for side in self.children]
        return min((side for side in sides if side is not None), key=len, default=None)


class Or(Pair, sign="|"):
    """The edges in one or both."""

    _rank = 0
    _either = True

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return self.left._at(b, h, i, j, sizes) | self.right._at(b, h, i, j, sizes)

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        first, last = self._ordered()
        edges = first._tile(rows, columns, sizes, within)
        if last._calls:
            within = ~edges if within is None else within & ~edges
        return edges | last._tile(rows, columns, sizes, within)

    def _block(self, tile: Tile) -> Block:
        first = self.left._block(tile)
        return first if first == Block.FULL else Block(max(first, self.right._block(tile)))

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        left, right = self.left._intervals(i, sizes), self.right._intervals(i, sizes)
        if left is None or right is None:
            return None
        return union(tidy(*left, sizes.source), tidy(*right, sizes.source))

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[Interval] | None:
        left = self.left._ranges(i, sizes, most)
        right = None if left is None else self.right._ranges(i, sizes, most)
        if left is None or right is None:
            return None
        one = union(left[0], right[0]) if len(left) == len(right) == 1 else None
        found = left + right if one is None else [one]
        return found if len(found) <= most else None

    def sources(self, queries: range, sizes: Sizes) -> Tensor | None:
        left = self.left.sources(queries, sizes)
        right = None if left is None else self.right.sources(queries, sizes)
        return None if left is None or right is None else torch.cat([left, right]).unique()


class Not(Composite, sign="~"):
    """All other edges."""

    _made_of = ("inner",)
    _rank = 3

    def __init__(self, inner: Mask):
        self.inner, self.own = inner, inner.own
        self._compose(inner)

    def to(self, device: torch.device | str) -> Mask:
        inner = self.inner.to(device)
        return self if inner is self.inner else Not(inner)

    def check(self, sizes: Sizes) -> None:
        self.inner.check(sizes)

    def tensors(self) -> list[Tensor]:
        return self.inner.tensors()

    def _least(self) -> int:
        return self.inner._least()

    def _text(self, full: bool) -> str:
        if self.weight > WRITTEN:
            return f"<{self.weight:,} masks composed>"
        text = self.inner._text(full)
        return f"~({text})" if self.inner._rank < self._rank else f"~{text}"

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return ~self.inner._at(b, h, i, j, sizes)

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        return ~self.inner._tile(rows, columns, sizes, within)

    def _block(self, tile: Tile) -> Block:
        return Block(2 - self.inner._block(tile))

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        found = self.inner._intervals(i, sizes)
        return None if found is None else other_side(tidy(*found, sizes.source), sizes.source)

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[Interval] | None:
        found = self.inner._ranges(i, sizes, most)
        return complement(found[0], sizes.source) if found and len(found) == 1 else None

    def _explain(self, edge: Edge, negated: bool) -> Verdict:
        return self.inner._explain(edge, not negated)


class Minus(Pair, sign="-"):
    """The edges of the first that are not in the second."""

    _rank = 2
    _negates_right = True

    def __init__(self, left: Mask, right: Mask):
        super().__init__(left, right)
        self._both = And(left, Not(right))

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return self._both._at(b, h, i, j, sizes)

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        return self._both._tile(rows, columns, sizes, within)

    def _block(self, tile: Tile) -> Block:
        return self._both._block(tile)

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        return self._both._intervals(i, sizes)

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[Interval] | None:
        return self._both._ranges(i, sizes, most)

    def sources(self, queries: range, sizes: Sizes) -> Tensor | None:
        return self.left.sources(queries, sizes)


class Appended(Mask, sign="+"):
    """A mask over the first sources; every query may also attend to `extra` appended ones."""

    def __init__(self, inner: Mask, extra: int):
        self.inner, self.extra, self._calls = inner, extra, inner._calls
        source = None if inner.own.source is None else inner.own.source + extra
        self.own = inner.own._replace(source=source)

    def to(self, device: torch.device | str) -> Mask:
        return Appended(self.inner.to(device), self.extra)

    def check(self, sizes: Sizes) -> None:
        self.inner.check(self._before(sizes))

    def tensors(self) -> list[Tensor]:
        return self.inner.tensors()

    def _before(self, sizes: Sizes) -> Sizes:
        return sizes._replace(source=sizes.source - self.extra)

    def _text(self, full: bool) -> str:
        return f"appended({self.inner._text(full)}, {self.extra})"

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        before = self._before(sizes)
        if before.source == 0:
            return (i == i) & (j == j)
        inside = self.inner._at(b, h, i, j.clamp(max=before.source - 1), before)
        return inside | (j >= before.source)

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        before, added = self._before(sizes), columns >= sizes.source - self.extra
        if before.source == 0:
            return added.expand(len(rows), -1)
        within = None if within is None else within & ~added
        return self.inner._tile(rows, columns.clamp(max=before.source - 1), before, within) | added

    def _block(self, tile: Tile) -> Block:
        before = tile.source - self.extra
        if tile.left >= before:
            return Block.FULL
        inside = self.inner._block(tile._replace(right=min(tile.right, before), source=before))
        return inside if tile.right <= before or inside == Block.FULL else Block.PARTIAL
