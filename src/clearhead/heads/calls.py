"""The attention calls of one run, whose statistics are taken several layers at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead._core import value_error
from clearhead.heads.batch import Batch
from clearhead.heads.layer_moments import BatchMoments
from clearhead.heads.map_summary import MapSummary
from clearhead.heads.statistics import CallValues

__all__ = ["PendingCalls"]

# Numbers in the maps of the calls that are reduced together.
TOGETHER = 1 << 19


class PendingCalls:
    """Values that were read of calls, until enough of them are there to be reduced at once.

    Reducing small calls one by one would take as long as the model itself.
    """

    def __init__(self, summary: MapSummary, names: Sequence[str]) -> None:
        self.names, self.layers = names, list[BatchMoments]()
        self._summaries = {1: summary}
        self._waiting: list[tuple[str, Sequence[Any]]] = []

    def add(self, module: str, value: Sequence[Any]) -> None:
        """Add the values of one call."""
        weights = value[-1]
        whole = isinstance(weights, Tensor)
        # Only whole maps of one shape are stacked.
        if self._waiting and not (whole and weights.shape == self._waiting[0][1][-1].shape):
            self.flush()
        self._waiting.append((module, value))
        if not whole or len(self._waiting) * weights.numel() >= TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Take the statistics of the calls that wait."""
        if not self._waiting:
            return
        modules, values = zip(*self._waiting, strict=True)
        self._waiting = []
        together = [_concatenated(each) for each in zip(*values, strict=True)]
        summary = self._summary(len(modules))
        found = CallValues(summary, dict(zip(self.names, together, strict=True)))
        _check_padding(modules, found)
        self.layers += BatchMoments.of(modules, found)

    def _summary(self, count: int) -> MapSummary:
        if count not in self._summaries:
            batch = self._summaries[1].batch
            repeated = Batch(batch.tokens.repeat(count, 1), batch.real.repeat(count, 1))
            self._summaries[count] = MapSummary(repeated)
        return self._summaries[count]


def _concatenated(values: Sequence[Any]) -> Any:
    """Concatenate what was read of several calls along the batch axis."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    return type(first)(*map(_concatenated, zip(*values, strict=True)))


def _check_padding(modules: Sequence[str], values: CallValues) -> None:
    """Refuse a model in which real tokens attend to padding: its numbers would depend on it."""
    if not values.batch.padded:
        return
    largest = values["padding"].view(len(modules), -1).amax(-1)
    for module, weight in zip(modules, largest.tolist(), strict=True):
        if weight > 0:
            raise value_error(
                "real",
                f"the model attends to padding in {module or 'its attention'}",
                got=f"a weight of {weight:.2g}",
                hint="give sequences of equal length, or run=, which passes the model's own mask",
            )
