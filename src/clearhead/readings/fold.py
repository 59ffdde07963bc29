"""How readings fold: the part of each strip, how parts merge, and what the value takes."""

# The methods are documented once, in Reading.
# ruff: noqa: D102
from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from clearhead._core import Sizes
from clearhead.readings.strip import Strip

__all__ = [
    "Blocks",
    "MapReading",
    "PerQuery",
    "PerQueryReading",
    "Reading",
    "SumReading",
    "place",
]


class Reading:
    """A fold over strips: `part` of each strip, `merge` of parts, `finish` to the value.

    Parts of different rows stand side by side, parts of the same rows but other sources add up;
    `merge` is associative and commutative, except for the order in which floats are added.

    A subclass with a gradient strip by strip (`part_grad`) declares it in its own class statement,
    `class Total(Reading, splits_grad=True)`. The declaration is not inherited: a subclass may
    change `part` or `merge`. `adds_up=True` declares that parts of the same rows but other sources
    add up too, so that each has the gradient of the sum: ranks that hold different sources need it.
    """

    splits_grad: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False
    # Whether the value has a number for each edge.
    whole_map: ClassVar[bool] = False
    # How many head axes each tensor of the value has.
    head_axes: ClassVar[int] = 1

    def __init_subclass__(
        cls, *, splits_grad: bool = False, adds_up: bool = False, **options: Any
    ) -> None:
        super().__init_subclass__(**options)
        cls.splits_grad, cls.adds_up = splits_grad, adds_up

    def check(self, sizes: Sizes) -> None:
        """Raise ValueError where the reading cannot be taken from maps of these sizes."""

    def part(self, strip: Strip) -> Any:
        """Read one strip."""
        raise NotImplementedError

    def merge(self, left: Any, right: Any) -> Any:
        """Put the parts of two strips together; the strips have no edge in common."""
        raise NotImplementedError

    def finish(self, part: Any) -> Any:
        """Turn the part of the whole map into the value of the reading."""
        raise NotImplementedError

    def part_grad(self, grad: Any, rows: slice, index: int) -> Any:
        """Give the gradient of one strip's part from that of the merged part.

        The strips hold whole rows and come in order; this one is number `index` and has `rows`.
        Where parts add up, each has the gradient of the sum.
        """
        return grad

    def constants(self, value: Any) -> tuple[Tensor, ...]:
        """List the floating-point tensors of the value that have no gradient."""
        return ()

    def tensors(self) -> list[Tensor]:
        """Return the caller's tensors that the reading reads whenever it is taken, not copies."""
        return []

    def nbytes(self, sizes: Sizes, itemsize: int = 4) -> int:
        """Count the bytes of the value, whose floating-point numbers take `itemsize` each.

        Unless a reading says otherwise, the value is one number a query and head.
        """
        return sizes.batch * sizes.head * sizes.query * itemsize

    def fold(self, strips: Iterable[Strip]) -> Any:
        """Read a whole map from its strips, in any order."""
        return self.finish(functools.reduce(self.merge, map(self.part, strips)))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"


class PerQuery(NamedTuple):
    """Part of a reading with numbers per query: the positions, ascending, and the numbers."""

    queries: Tensor  # (rows,)
    values: tuple[Tensor, ...]  # each (..., rows) or (..., rows, k)


class Blocks(NamedTuple):
    """Part of a reading of the map itself: pieces (queries, sources, values), put in place last."""

    pieces: tuple[tuple[Tensor, Tensor, Tensor], ...]
    query: int
    source: int


class PerQueryReading(Reading):
    """Numbers per query: rows stand side by side, the same row adds up by `_combine`."""

    axis = -1
    _empty: tuple[float, ...] = (0.0,)

    def _combine(self, left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(a + b for a, b in zip(left, right, strict=True))

    def merge(self, left: PerQuery, right: PerQuery) -> PerQuery:
        if torch.equal(left.queries, right.queries):
            return PerQuery(left.queries, self._combine(left.values, right.values))
        queries = torch.cat([left.queries, right.queries]).unique()
        if len(queries) == len(left.queries) + len(right.queries):
            return self._beside(left, right)
        return PerQuery(
            queries, self._combine(self._spread(left, queries), self._spread(right, queries))
        )

    def _beside(self, left: PerQuery, right: PerQuery) -> PerQuery:
        queries, order = torch.cat([left.queries, right.queries]).sort()
        pairs = zip(left.values, right.values, strict=True)
        values = (torch.cat(pair, self.axis).index_select(self.axis, order) for pair in pairs)
        return PerQuery(queries, tuple(values))

    def _spread(self, part: PerQuery, queries: Tensor) -> tuple[Tensor, ...]:
        """The part's values at more queries; those it has not seen are empty."""
        at = torch.searchsorted(queries, part.queries)
        spread = []
        for value, empty in zip(part.values, self._empty, strict=True):
            shape = list(value.shape)
            shape[self.axis] = len(queries)
            spread.append(value.new_full(shape, empty).index_copy(self.axis, at, value))
        return tuple(spread)

    def finish(self, part: PerQuery) -> Any:
        return part.values[0]

    def part_grad(self, grad: PerQuery, rows: slice, index: int) -> PerQuery:
        values: Any = (
            None if x is None else x.narrow(self.axis, rows.start, rows.stop - rows.start)
            for x in grad.values
        )
        return PerQuery(grad.queries, tuple(values))


class SumReading(Reading):
    """Tensors that have their final shape in every part, and add up."""

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right

    def finish(self, part: Tensor) -> Tensor:
        return part


class MapReading(Reading):
    """The map itself: pieces are kept as they come and put in their places at the end."""

    whole_map = True
    _blocked = 0.0

    def merge(self, left: Blocks, right: Blocks) -> Blocks:
        return Blocks(left.pieces + right.pieces, left.query, left.source)

    def finish(self, part: Blocks) -> Tensor:
        first = part.pieces[0][2]
        if len(part.pieces) == 1 and first.shape[-2:] == (part.query, part.source):
            return first
        whole = first.new_full((*first.shape[:-2], part.query, part.source), self._blocked)
        for queries, sources, piece in part.pieces:
            whole[..., queries[:, None], sources] = piece
        return whole

    def part_grad(self, grad: Blocks, rows: slice, index: int) -> Blocks:
        return Blocks((grad.pieces[index],), grad.query, grad.source)

    def nbytes(self, sizes: Sizes, itemsize: int = 4) -> int:
        return sizes.batch * sizes.head * sizes.query * sizes.source * itemsize


def place(values: Tensor, sources: Tensor, source: int) -> Tensor:
    """Values at some sources as values at all sources, 0 elsewhere."""
    if sources.shape[0] == source:
        return values
    return values.new_zeros(*values.shape[:-1], source).index_add(-1, sources, values)
