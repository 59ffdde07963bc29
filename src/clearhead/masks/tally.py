"""Counting edges without testing each."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.masks.mask import PATIENCE, Block, Mask

if TYPE_CHECKING:
    from clearhead._core import Sizes

# Tiles of this many positions a side are tested where `block` does not know.
TILE = 128


class Tally:
    """Counts the edges of tiles, exactly, without testing those that `block` knows."""

    def __init__(self, mask: Mask, sizes: Sizes):
        self.mask, self.sizes, self.tested = mask, sizes, 0
        edge = torch.zeros(min(sizes.query, 1), dtype=torch.int64)
        column = torch.zeros(min(sizes.source, 1), dtype=torch.int64)
        # Some masks tell only by an answer whether they vary over samples and heads.
        shape = mask._tile(edge, column, sizes).shape
        self.lead = tuple(shape[:2]) if len(shape) == 4 else (1, 1)

    def count(self, top: int, bottom: int, left: int, right: int) -> int | Tensor:
        """Return the number of edges of a tile; (batch or 1, head or 1) where samples differ."""
        tall, wide = bottom - top, right - left
        if not tall or not wide:
            return 0
        block = self.mask._block(top, bottom, left, right, self.sizes.query, self.sizes.source)
        if block != Block.PARTIAL:
            return tall * wide if block else 0
        if tall <= TILE and wide <= TILE:
            return self._test(top, bottom, left, right)
        down = (top, top + tall // 2, bottom) if tall > TILE else (top, bottom)
        across = (left, left + wide // 2, right) if wide > TILE else (left, right)
        return sum(
            self.count(*rows, *columns) for rows in pairwise(down) for columns in pairwise(across)
        )

    def _test(self, top: int, bottom: int, left: int, right: int) -> int | Tensor:
        self.tested += (bottom - top) * (right - left) * self.lead[0] * self.lead[1]
        if self.tested > PATIENCE:
            raise self.mask._too_many(self.sizes)
        tile = self.mask._tile(torch.arange(top, bottom), torch.arange(left, right), self.sizes)
        counted = tile.sum((-2, -1))
        return counted if tile.dim() == 4 else int(counted)
