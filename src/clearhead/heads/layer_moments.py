"""The statistics of each layer: what one batch adds to them, and their running totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.heads.map_summary import CORNER
from clearhead.heads.moments import Moments
from clearhead.heads.statistics import STATISTICS, CallValues, moments_of

__all__ = ["BatchMoments", "LayerOutline", "LayerStatistics", "Totals", "joined"]


class LayerOutline(NamedTuple):
    """The module of a layer and its number of heads: which numbers belong to it."""

    module: str
    heads: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of a layer's statistics, overlap and corner."""
        heads = self.heads
        return [(len(STATISTICS), heads), (heads, heads), (heads, CORNER, CORNER)]


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """The statistics of one layer, over all sequences so far."""

    module: str
    statistics: Moments  # (statistic, head)
    overlap: Moments  # (head, head)
    corner: Moments  # (head, CORNER, CORNER)

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.overlap.count.shape[0]

    def variability(self) -> Tensor:
        """The share of the weights' squares that differs between sequences, (head,)."""
        corner = self.corner
        own = torch.where(corner.count > 1, corner.spread, 0).sum((-2, -1))
        squares = torch.where(corner.count > 1, corner.count * corner.mean**2, 0).sum((-2, -1))
        return own / (own + squares)


@dataclass(frozen=True, eq=False)
class BatchMoments:
    """What a batch adds to one layer, sequence by sequence: a batch axis before the head axis."""

    outline: LayerOutline
    statistics: Moments  # (statistic, batch, head)
    overlap: Moments  # (batch, head, head)
    corner: Moments  # (batch, head, CORNER, CORNER)

    @staticmethod
    def of(modules: Sequence[str], values: CallValues) -> list[BatchMoments]:
        """Take the statistics of several calls, concatenated along the batch axis."""
        overlap = values["overlap"]
        some = values.rows.any(-1)[..., None]
        pairs = Moments.of(overlap.unsqueeze(-1), (some & some.mT).unsqueeze(-1))
        statistics, corner = moments_of(values), _corner(values)
        size = len(overlap) // len(modules)
        found = []
        for number, module in enumerate(modules):
            own = slice(number * size, (number + 1) * size)
            outline = LayerOutline(module, overlap.shape[-1])
            found.append(BatchMoments(outline, statistics[:, own], pairs[own], corner[own]))
        return found

    def numbers(self) -> list[Moments]:
        """Statistics, overlap and corner, each (batch, number)."""
        statistics = self.statistics.map(lambda x: x.movedim(1, 0))
        return [m.map(lambda x: x.flatten(1)) for m in (statistics, self.overlap, self.corner)]


def _corner(values: CallValues) -> Moments:
    """The weights among the first real positions of each sequence, each counted once."""
    batch, corner = values.batch, values["corner"]
    at = batch.start[:, None] + torch.arange(CORNER, device=corner.device)
    inside = at < batch.sizes[1]
    at = at.clamp(max=max(batch.sizes[1] - 1, 0))
    real = batch.real.gather(-1, at) & inside
    rows = torch.stack([r[:, a] for r, a in zip(values.rows, at, strict=True)])
    counted = (rows & real[:, None])[..., None] & real[:, None, None]
    return Moments.of(corner.unsqueeze(-1), counted.unsqueeze(-1))


def joined(layers: Sequence[BatchMoments]) -> Moments:
    """All numbers of all layers, (batch, number): statistics first, then overlaps, then corners."""
    kinds = zip(*(layer.numbers() for layer in layers), strict=True)
    return Moments.cat([moments for kind in kinds for moments in kind])


class Totals:
    """The numbers of all layers in one row, so that adding a sequence takes few operations."""

    def __init__(self, outlines: Sequence[LayerOutline], moments: Moments | None = None) -> None:
        self.outlines = list(outlines)
        shapes = [outline.shapes for outline in self.outlines]
        # Kind by kind, in the order of `joined`.
        self._shapes = [kind for kinds in zip(*shapes, strict=True) for kind in kinds]
        size = sum(map(prod, self._shapes))
        self.moments = Moments.none((size,)) if moments is None else moments

    @property
    def statistics_size(self) -> int:
        """How many of the numbers are statistics: the first ones."""
        return sum(prod(outline.shapes[0]) for outline in self.outlines)

    def add(self, moments: Moments) -> None:
        """Add the row of one sequence."""
        self.moments = self.moments.merge(moments)

    @property
    def layers(self) -> list[LayerStatistics]:
        """The numbers layer by layer."""
        ends = torch.tensor([prod(shape) for shape in self._shapes]).cumsum(0).tolist()
        kinds = [
            self.moments[end - prod(shape) : end].map(lambda x, shape=shape: x.view(shape))
            for end, shape in zip(ends, self._shapes, strict=True)
        ]
        count = len(self.outlines)
        return [
            LayerStatistics(outline.module, *kinds[number::count])
            for number, outline in enumerate(self.outlines)
        ]
