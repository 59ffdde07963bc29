"""One validated attention call, as every implementation receives it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from clearhead._core import Sizes

if TYPE_CHECKING:
    from clearhead.masks import Mask

__all__ = ["Corner", "Problem", "default_scale", "sizes_of"]


class Corner(NamedTuple):
    """Where the map of a problem lies in a larger one: its first head, query and source."""

    head: int
    query: int
    source: int
    whole: Sizes  # the sizes of the larger map


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """The checked inputs of one call. All tensors have a head axis; a mask and a bias broadcast."""

    query: Tensor  # (*batch, head, query, head_dim)
    key: Tensor  # (*batch, source_head, source, head_dim); head is a multiple of source_head
    value: Tensor  # (*batch, source_head, source, value_dim)
    mask: Mask | None
    scale: float
    bias: Tensor | None = None  # broadcasts to (*batch, head, query, source)
    softcap: float | None = None
    sinks: Tensor | None = None  # (head,)
    dropout: float = 0.0
    seed: Tensor | None = None  # int64 scalar, drawn once a call where dropout > 0
    corner: Corner | None = None  # dropout counts the edges of the whole map

    @property
    def group(self) -> int:
        """How many query heads share one source head."""
        return self.query.shape[-3] // max(self.key.shape[-3], 1)

    @property
    def sizes(self) -> Sizes:
        """The sizes that masks and readings receive; several batch axes count as their product."""
        return sizes_of(self.query, self.key)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that scores, weights and readings are computed in."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def allowed(self, rows: Tensor, columns: Tensor) -> Tensor | None:
        """Which of these rows may read which of these columns, by the mask; None for all.

        The answer broadcasts to (*batch, head, rows, columns). A bias may block further edges.
        """
        if self.mask is None:
            return None
        sizes = self.sizes
        tile = self.mask.tile(rows, columns, sizes)
        if tile.ndim == 2:
            return tile
        batch = self.query.shape[:-3] if tile.shape[0] != 1 else ()
        return tile.reshape(*batch, *tile.shape[1:])


def sizes_of(query: Tensor, key: Tensor) -> Sizes:
    """The sizes of tensors with a head axis; several batch axes count as their product."""
    *batch, head, rows, _ = query.shape
    flat = 1
    for size in batch:
        flat *= size
    return Sizes(flat, head, rows, key.shape[-2])


def default_scale(head_dim: int) -> float:
    """Return 1/sqrt(head_dim), which keeps the variance of the scores at that of the inputs."""
    return 1 / math.sqrt(head_dim) if head_dim else 1.0
