"""A strip of the weight map: some queries and some sources, as readings receive it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._core import Sizes, value_error

__all__ = ["Strip"]


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
        """The sizes of the whole map, as masks receive them."""
        *batch, head = self.weights.shape[:-2] or (1,)
        return Sizes(math.prod(batch), head, self.query, self.source)


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
