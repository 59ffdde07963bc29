"""How readings fold: strips of the weight map, parts of a reading, and how parts merge."""

# The methods are documented once, in Reading.
# ruff: noqa: D102
from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from clearhead._core import value_error

if TYPE_CHECKING:
    from clearhead._core import Sizes

__all__ = [
    "Blocks",
    "MapReading",
    "PerQuery",
    "PerQueryReading",
    "Reading",
    "Strip",
    "SumReading",
    "place",
]


@dataclass(frozen=True, eq=False)
class Strip:
    """A piece of the weight map: some queries, some sources, as readings receive it.

    `weights` are before dropout; `lse` is the log-sum-exp of the *whole* row (sinks included), also
    where the piece holds only some of its sources, so that parts of a row add up.
    """

    scores: Tensor  # (*batch, head, rows, columns); -inf where blocked
    weights: Tensor  # the same; 0 where blocked
    lse: Tensor  # (*batch, head, rows)
    queries: Tensor  # (rows,) int64, positions in 0..query-1, ascending
    sources: Tensor  # (columns,) int64, positions in 0..source-1, ascending
    query: int  # how many queries and sources the whole map has
    source: int

    @staticmethod
    def of(
        scores: Tensor,
        *,
        lse: Tensor | None = None,
        queries: Sequence[int] | Tensor | None = None,
        sources: Sequence[int] | Tensor | None = None,
        query: int | None = None,
        source: int | None = None,
    ) -> Strip:
        """Weigh a piece of the score map with the log-sum-exp of its whole rows.

        >>> Strip.of(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])).weights
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])

        `queries` and `sources` are the positions of the piece's rows and columns, `query` and
        `source` how many there are in the whole; without them the piece is the whole.
        """
        lse = torch.logsumexp(scores, -1) if lse is None else lse
        rows, columns = scores.shape[-2:]
        return Strip(
            scores=scores,
            weights=_weigh(scores, lse),
            lse=lse,
            queries=_positions("queries", queries, rows, scores),
            sources=_positions("sources", sources, columns, scores),
            query=rows if query is None else query,
            source=columns if source is None else source,
        )

    @property
    def allowed(self) -> Tensor:
        """The edges that are not blocked: those with a score above -inf, or NaN."""
        return self.scores != -torch.inf

    @property
    def sizes(self) -> Sizes:
        """The sizes of the whole map, as masks are asked with them."""
        # A mask's module must be able to import readings first, hence not at the top.
        from clearhead._core import Sizes

        *batch, head = self.weights.shape[:-2] or (1,)
        return Sizes(functools.reduce(operator.mul, batch, 1), head, self.query, self.source)


def _weigh(scores: Tensor, lse: Tensor) -> Tensor:
    blocked = scores == -torch.inf
    # The difference is finite before exp sees it, so that no gradient becomes 0 * inf.
    return torch.where(blocked, 0, scores - lse.unsqueeze(-1)).exp().masked_fill(blocked, 0)


def _positions(name: str, given: Sequence[int] | Tensor | None, size: int, like: Tensor) -> Tensor:
    if given is None:
        return torch.arange(size, device=like.device)
    positions = torch.as_tensor(given, dtype=torch.int64, device=like.device)
    if positions.shape != (size,):
        raise value_error(
            name,
            "needs one position for each row (queries) and column (sources) of scores",
            shapes={name: positions, "scores": like},
        )
    return positions


class Reading:
    """A fold over strips: `part` of each strip, `merge` of parts, `finish` to the value.

    Parts of different rows stand side by side, parts of the same rows but other sources add up;
    `merge` is associative and commutative, except for the order in which floats are added.
    """

    def check(self, sizes: Sizes) -> None:
        """Raise ValueError where the reading cannot be taken from maps of these sizes."""

    def part(self, strip: Strip) -> Any:
        """Read one strip."""
        raise NotImplementedError

    def merge(self, left: Any, right: Any) -> Any:
        """Put the parts of two strips together; the strips have no edge in common."""
        raise NotImplementedError

    def finish(self, part: Any) -> Any:
        """Turn the part of the whole map into the value that is handed out."""
        raise NotImplementedError

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


class SumReading(Reading):
    """Tensors that have their final shape in every part, and add up."""

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right

    def finish(self, part: Tensor) -> Tensor:
        return part


class MapReading(Reading):
    """The map itself: pieces are kept as they come and put in their places at the end."""

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


def place(values: Tensor, sources: Tensor, source: int) -> Tensor:
    """Values at some sources as values at all sources, 0 elsewhere."""
    if sources.shape[0] == source:
        return values
    return values.new_zeros(*values.shape[:-1], source).index_add(-1, sources, values)
