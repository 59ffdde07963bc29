"""What can be read while the weights pass: the base that every reading shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Reading", "Strip"]


@dataclass(frozen=True, eq=False)
class Strip:
    """Some rows of the weight map, whole or in part, as readings receive them.

    `weights` are before dropout; `lse` is the log-sum-exp of the *whole* row (sinks included), also
    where the strip holds only some of its sources, so that parts of a row add up.
    """

    scores: Tensor  # (*batch, head, rows, columns); -inf where masked
    weights: Tensor  # the same; 0 where masked
    lse: Tensor  # (*batch, head, rows)
    queries: Tensor  # (rows,) int64, positions in 0..query-1
    sources: Tensor  # (columns,) int64, positions in 0..source-1, ascending
    query: int  # how many queries and sources the whole map has
    source: int


class Reading:
    """A fold over strips: `part` of each strip, `merge` of parts, `finish` to the value."""

    def part(self, strip: Strip) -> Any:
        raise NotImplementedError

    def merge(self, left: Any, right: Any) -> Any:
        raise NotImplementedError

    def finish(self, part: Any) -> Any:
        raise NotImplementedError
