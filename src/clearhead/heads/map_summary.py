"""The reading of the statistics that need more than single rows, from strips or whole maps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.heads.batch import Batch
from clearhead.heads.edge_sets import EdgeSets
from clearhead.readings import Overlap, Reading, Strip

__all__ = ["CORNER", "MapSummary", "MapValues"]

# Rows and columns of the corner of the map in which variability is measured.
CORNER = 16
# Numbers in a cache line.
LINE = 16


class MapValues(NamedTuple):
    """The value of `MapSummary` for one call."""

    masses: Tensor  # (edge set, batch, head, query)
    received: Tensor  # (batch, head, source)
    overlap: Tensor  # (batch, head, head)
    corner: Tensor  # (batch, head, CORNER, CORNER), from the first real position on
    padding: Tensor  # (batch, head): the largest weight that a real row puts on padding


class MapSummary(Reading):
    """The mass on each set of edges, received weight, overlap and corner of every map.

    Rows of padding count as zero. The sums over a sequence's edges are taken in the order of its
    positions, so that they do not depend on the rest of the batch.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch, self._edge_sets = batch, EdgeSets(batch)

    def of(self, weights: Tensor) -> MapValues:
        """Summarize whole maps, (batch, head, position, position)."""
        positions = torch.arange(weights.shape[-1], device=weights.device)
        return self.finish(self._part(weights, positions, positions))

    def part(self, strip: Strip) -> MapValues:
        """Summarize one strip."""
        return self._part(strip.weights, strip.queries, strip.sources)

    def merge(self, left: MapValues, right: MapValues) -> MapValues:
        """Merge the parts of two strips."""
        sums = MapValues(*(a + b for a, b in zip(left, right, strict=True)))
        return sums._replace(padding=torch.maximum(left.padding, right.padding))

    def finish(self, part: MapValues) -> MapValues:
        """Turn the products of maps into cosines."""
        return part._replace(overlap=Overlap().finish(part.overlap))

    def _part(self, weights: Tensor, queries: Tensor, sources: Tensor) -> MapValues:
        weights, padding = self._without_padding(weights, queries, sources)
        received = weights.new_zeros(*weights.shape[:2], self.batch.sizes[1])
        received[..., sources] = weights.sum(-2)
        # Pad to whole cache lines: the last bits of a product depend on how its rows are aligned.
        maps = torch.nn.functional.pad(weights.flatten(-2), (0, -weights[0, 0].numel() % LINE))
        return MapValues(
            self._edge_sets.masses(weights, queries, sources),
            received,
            maps @ maps.mT,
            self._corner(weights, queries, sources),
            padding,
        )

    def _without_padding(
        self, weights: Tensor, queries: Tensor, sources: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Zero the rows of padding; also return the largest weight left on a padded source."""
        padding = weights.new_zeros(weights.shape[:2])
        if not self.batch.padded:
            return weights, padding
        real = self.batch.real
        weights = torch.where(real[:, None, queries, None], weights, 0)
        padded = torch.where(real[:, None, None, sources], 0, weights)
        return weights, padded.sum(-1).amax(-1) if padded.numel() else padding

    def _corner(self, weights: Tensor, queries: Tensor, sources: Tensor) -> Tensor:
        """The corner's weights that the strip holds, 0 elsewhere."""
        corner = weights.new_zeros(*weights.shape[:2], CORNER, CORNER)
        for start in self.batch.start.unique().tolist():
            samples = (self.batch.start == start).nonzero()[:, 0]
            row, column = (
                ((at >= start) & (at < start + CORNER)).nonzero()[:, 0] for at in (queries, sources)
            )
            own = torch.zeros_like(corner[samples])
            held = weights[:, :, row[:, None], column][samples]
            own[:, :, queries[row][:, None] - start, sources[column] - start] = held
            corner[samples] = own
        return corner
