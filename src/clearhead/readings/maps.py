"""The readings of whole maps: blocks of the weights, and how alike the maps of heads are."""

# The methods are documented once, in Reading.
# ruff: noqa: D102
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead._core import Sizes
from clearhead.readings.cells import by_cell, positive
from clearhead.readings.fold import Reading, SumReading, place
from clearhead.readings.strip import Strip

__all__ = ["BlockMap", "BlockMapValue", "Overlap"]


class _Tiles(NamedTuple):
    mean: Tensor  # (*batch, head, cells, cells)
    max: Tensor  # the same


class BlockMapValue(_Tiles):
    """The value of `BlockMap`: mean and largest weight of every tile."""

    __slots__ = ()

    def __new__(cls, *parts: Any, **named: Any) -> BlockMapValue:
        # A subclass of Tensor makes the results of its functions anew, from one iterable.
        return super().__new__(cls, *(parts if named or len(parts) != 1 else parts[0]), **named)


class BlockMap(Reading, splits_grad=True, adds_up=True):
    """A small picture of the weight map: mean and max of each tile, (*batch, head, cells, cells).

    >>> scores = torch.tensor([[0.0, -torch.inf, -torch.inf], [0.0, 0.0, -torch.inf]])
    >>> BlockMap(2).fold([Strip.of(scores)]).mean
    tensor([[0.5000, 0.0000],
            [0.5000, 0.0000]])

    There are `cells` tiles a side, fewer where there are fewer positions; they are split as
    `torch.tensor_split` does. The mean is over all edges of the tile, blocked ones as 0.
    """

    def __init__(self, cells: int):
        self.cells = positive("cells", cells)

    def part(self, strip: Strip) -> tuple[Tensor, Tensor]:
        mean = self.reduce(strip, strip.weights, torch.sum) / self.edges(strip)
        # Only the mean has a gradient; the largest weight is for display.
        return mean, self.reduce(strip, strip.weights.detach(), torch.amax)

    def reduce(self, strip: Strip, weights: Tensor, how: Callable[..., Tensor]) -> Tensor:
        """Sum or largest of the weights in each tile; what the strip does not hold counts as 0."""
        across = by_cell(place(weights, strip.sources, strip.source), self.cells, how)
        down = place(across.mT, strip.queries, strip.query)
        return by_cell(down, self.cells, how).mT

    def edges(self, strip: Strip) -> Tensor:
        """How many edges each tile has, blocked ones too."""
        ones = torch.ones(
            max(strip.query, strip.source), dtype=torch.float32, device=strip.lse.device
        )
        down = by_cell(ones[: strip.query], self.cells, torch.sum)
        return (down[:, None] * by_cell(ones[: strip.source], self.cells, torch.sum)).to(strip.lse)

    def merge(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Any:
        return left[0] + right[0], torch.maximum(left[1], right[1])

    def finish(self, part: tuple[Tensor, Tensor]) -> BlockMapValue:
        return BlockMapValue(*part)

    def constants(self, value: BlockMapValue) -> tuple[Tensor, ...]:
        return (value.max,)

    def nbytes(self, sizes: Sizes, itemsize: int = 4) -> int:
        cells = min(self.cells, sizes.query) * min(self.cells, sizes.source)
        return 2 * sizes.batch * sizes.head * cells * itemsize


class Overlap(SumReading, splits_grad=True):
    """How alike two heads look: the cosine between their weight maps, (*batch, head, head).

    >>> scores = torch.tensor([[[0.0, -torch.inf]], [[-torch.inf, 0.0]], [[0.0, 0.0]]])
    >>> Overlap().fold([Strip.of(scores)])
    tensor([[1.0000, 0.0000, 0.7071],
            [0.0000, 1.0000, 0.7071],
            [0.7071, 0.7071, 1.0000]])

    A head whose map is all zero has cosine 0 with every head, itself included.
    """

    head_axes = 2

    def part(self, strip: Strip) -> Tensor:
        maps = strip.weights.flatten(-2)
        return maps @ maps.transpose(-1, -2)

    def finish(self, part: Tensor) -> Tensor:
        squares = part.diagonal(dim1=-2, dim2=-1)
        # A NaN square is not zero: it must reach the result.
        empty = squares == 0
        lengths = torch.where(empty, 1, squares).sqrt()
        return part / (lengths.unsqueeze(-1) * lengths.unsqueeze(-2))

    def nbytes(self, sizes: Sizes, itemsize: int = 4) -> int:
        return sizes.batch * sizes.head * sizes.head * itemsize
