"""Count, mean and variance that merge across the parts of a corpus, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Moments"]


@dataclass(frozen=True, eq=False)
class Moments:
    """The number of values, their mean, and the sum of squared deviations from it.

    >>> left = Moments.of(torch.tensor([1.0, 2.0]))
    >>> both = left.merge(Moments.of(torch.tensor([6.0])))
    >>> float(both.mean), float(both.variance)
    (3.0, 4.666666666666667)

    The parts merge by the update of Chan, Golub and LeVeque (1979, "Updating Formulae and a
    Pairwise Algorithm for Computing Sample Variances"), which subtracts no large sums. All three
    have the same shape, with one entry for each quantity.
    """

    count: Tensor
    mean: Tensor
    spread: Tensor

    @staticmethod
    def of(values: Tensor, counted: Tensor | None = None) -> Moments:
        """Reduce the last axis; values that are not counted may be anything."""
        # On the CPU, as not every device has float64.
        values = values.cpu().double()
        mask = torch.ones((), dtype=torch.bool) if counted is None else counted.cpu()
        values, mask = torch.broadcast_tensors(values, mask)
        count = mask.sum(-1).double()
        mean = torch.where(mask, values, 0).sum(-1) / count.clamp(min=1)
        spread = torch.where(mask, values - mean.unsqueeze(-1), 0).square().sum(-1)
        return Moments(count, mean, spread)

    @staticmethod
    def none(shape: tuple[int, ...]) -> Moments:
        """Return the moments of no values."""
        return Moments(*(torch.zeros(shape, dtype=torch.float64) for _ in range(3)))

    @property
    def variance(self) -> Tensor:
        """The population variance; 0 where nothing was counted."""
        return self.spread / self.count.clamp(min=1)

    def merge(self, other: Moments) -> Moments:
        """Merge two parts."""
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        step = other.mean - self.mean
        mean = torch.where(self.count == 0, other.mean, self.mean + step * share)
        spread = self.spread + other.spread + step.square() * self.count * share
        return Moments(count, torch.where(count == 0, 0, mean), spread)

    def map(self, change: Callable[[Tensor], Tensor]) -> Moments:
        """Apply one change of shape to count, mean and spread."""
        return Moments(change(self.count), change(self.mean), change(self.spread))

    @staticmethod
    def stack(parts: Sequence[Moments]) -> Moments:
        """Stack moments of one shape along a new first axis."""
        return Moments(*(torch.stack(x) for x in zip(*map(Moments._fields, parts), strict=True)))

    @staticmethod
    def cat(parts: Sequence[Moments]) -> Moments:
        """Concatenate moments along the last axis."""
        return Moments(*(torch.cat(x, -1) for x in zip(*map(Moments._fields, parts), strict=True)))

    def _fields(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count, self.mean, self.spread

    def __getitem__(self, at: Any) -> Moments:
        return self.map(lambda x: x[at])
