"""What one attention call adds to the statistics of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._heads.moments import Moments
from clearhead._heads.statistics import CORNER, STATISTICS, Values

__all__ = ["Layer", "Part"]


@dataclass(frozen=True, eq=False)
class Layer:
    """The statistics of one layer, over all sequences so far."""

    module: str
    statistics: Moments  # (statistic, head)
    overlap: Moments  # (head, head)
    corner: Moments  # (head, CORNER, CORNER)

    @staticmethod
    def none(module: str, heads: int) -> Layer:
        """Nothing seen yet."""
        shapes = (len(STATISTICS), heads), (heads, heads), (heads, CORNER, CORNER)
        return Layer(module, *(Moments.none(shape) for shape in shapes))

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return self.overlap.count.shape[0]

    def merge(self, other: Layer) -> Layer:
        """Put two parts of a corpus together."""
        return Layer(
            self.module,
            self.statistics.merge(other.statistics),
            self.overlap.merge(other.overlap),
            self.corner.merge(other.corner),
        )

    def tensors(self) -> dict[str, Tensor]:
        """The numbers, for a file."""
        return {
            f"{name}.{field}": getattr(getattr(self, name), field)
            for name in ("statistics", "overlap", "corner")
            for field in ("count", "mean", "spread")
        }

    @staticmethod
    def of(module: str, tensors: Mapping[str, Tensor]) -> Layer:
        """Make a layer from what `tensors` gave."""
        names = ("statistics", "overlap", "corner")
        fields = ("count", "mean", "spread")
        return Layer(module, *(Moments(*(tensors[f"{n}.{f}"] for f in fields)) for n in names))

    def variability(self) -> Tensor:
        """The share of the weights' squares that differs between sequences, (head,)."""
        corner = self.corner
        own = torch.where(corner.count > 1, corner.spread, 0).sum((-2, -1))
        squares = torch.where(corner.count > 1, corner.count * corner.mean**2, 0).sum((-2, -1))
        return own / (own + squares)


@dataclass(frozen=True, eq=False)
class Part:
    """What a batch adds to one layer, sequence by sequence: a batch axis before the head axis."""

    module: str
    statistics: Moments  # (statistic, batch, head)
    overlap: Moments  # (batch, head, head)
    corner: Moments  # (batch, head, CORNER, CORNER)

    @staticmethod
    def of(module: str, values: Values) -> Part:
        """Take all statistics of one call."""
        each = [statistic.of(values) for statistic in STATISTICS.values()]
        fields = zip(*((m.count, m.mean, m.spread) for m in each), strict=True)
        overlap = values["overlap"]
        some = values.rows.any(-1)[..., None]
        pairs = Moments.of(overlap.unsqueeze(-1), (some & some.mT).unsqueeze(-1))
        return Part(module, Moments(*map(torch.stack, fields)), pairs, _corner(values))

    def sequence(self, number: int) -> Layer:
        """What one sequence adds."""
        return Layer(
            self.module, self.statistics[:, number], self.overlap[number], self.corner[number]
        )


def _corner(values: Values) -> Moments:
    """The weights among the first real positions of each sequence, each counted once."""
    batch, weights = values.batch, values["corner"]
    at = batch.start[:, None] + torch.arange(CORNER, device=weights.device)
    inside = at < batch.sizes[1]
    at = at.clamp(max=max(batch.sizes[1] - 1, 0))
    pairs = zip(weights, at, strict=True)
    # The positions that are not read stand for none: they are left out below.
    corner = torch.stack([w[:, a.clamp(max=w.shape[1] - 1)][:, :, a] for w, a in pairs])
    real = batch.real.gather(-1, at) & inside
    rows = torch.stack([r[:, a] for r, a in zip(values.rows, at, strict=True)])
    counted = (rows & real[:, None])[..., None] & real[:, None, None]
    return Moments.of(corner.unsqueeze(-1), counted.unsqueeze(-1))
