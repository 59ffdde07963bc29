"""What the gradients of readings add to the gradients of the weights, as the kernel takes it.

The gradient of a score is p_ij (x_ij - sum_k p_ik x_ik) where x_ij is that of the weight p_ij:
grad . value for the context, and for a reading a few numbers a row or a source, which the kernel
adds to each tile. The sum over a row is known from the reading's value, or found by the kernel in a
pass of its own. What is asked of the scores themselves is added to the gradient of each.

What is asked of the overlap of heads hangs on the weights of all of them: it is made of their maps,
some queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from clearhead import readings
from clearhead.attention.impl.native import kernel, overlap
from clearhead.attention.problem import Problem
from clearhead.readings import Reading, TopKValue

__all__ = ["KEPT", "Changes", "sink_weights", "taken", "value"]

# The value of these says what their gradient is worth to a row.
KEPT = {readings.Entropy, readings.Distance, readings.Mass, readings.TopK}

# The kernel has the gradient, whoever has found the value.
ALSO = {readings.Mass, readings.Scores, readings.Overlap}


def taken(inputs: kernel.Inputs, read: tuple[Reading, ...]) -> set[Reading]:
    """The readings whose gradients the kernel takes in."""
    return {*kernel.native_readings(inputs, read), *(r for r in read if type(r) in ALSO)}


def value(reading: Reading, kept: Iterator[Tensor]) -> Any:
    """The next value among those kept, a tensor or a pair."""
    return TopKValue(next(kept), next(kept)) if isinstance(reading, readings.TopK) else next(kept)


class Changes:
    """What the gradients of readings add to the gradients of the weights."""

    def __init__(self, inputs: kernel.Inputs, lse: Tensor):
        self.inputs, self.lse = inputs, lse
        self.shape, self.source = tuple(inputs.query.shape[:3]), inputs.key.shape[2]
        # sum_k p_ik x_ik of each row, all but the context's share; the kernel adds what it finds.
        self.terms = torch.zeros(self.shape, dtype=torch.float32)
        self.entropy: Tensor | None = None
        self.distance: Tensor | None = None
        self.masses: dict[Reading, tuple[kernel.ReadEdges, Tensor]] = {}
        self.received: Tensor | None = None
        self.scores: Tensor | None = None
        self.overlap: overlap.Overlap | None = None
        self.cells: tuple[Tensor, ...] | None = None
        self.tops: list[tuple[Tensor, Tensor]] = []
        self.maps: list[tuple[Reading, Tensor]] = []
        self.asked: list[tuple[Any, ...]] | None = None

    def add(self, reading: Reading, value: Any, share: Any) -> None:
        """Take in the gradient of one reading; a value that is not needed may be None."""
        if isinstance(reading, readings.TopK):
            self._add_top(value, share.weights)
        elif isinstance(reading, readings.BlockMap):
            self._add_cells(reading, self._flat(share.mean))
        elif isinstance(reading, readings.Rows | readings.Weights):
            self.maps.append((reading, self._flat(share)))
        elif isinstance(reading, readings.Received):
            self.received = _sum(self.received, self._flat(share))
        elif isinstance(reading, readings.LogSumExp):
            self.terms -= self._flat(share)
        elif isinstance(reading, readings.Scores):
            self.scores = _sum(self.scores, self._flat(share))
        elif isinstance(reading, readings.Overlap):
            self.overlap = self.overlap or overlap.Overlap(self.inputs)
            self.overlap.add(self._flat(share))
        else:
            self._add_per_query(reading, self._flat(value), self._flat(share))

    def _flat(self, x: Tensor) -> Tensor:
        """In fp32, with one batch axis."""
        lead = self.inputs.problem.query.ndim - 2
        return x.detach().float().reshape(*self.shape[:2], *x.shape[lead:]).contiguous()

    def _add_per_query(self, reading: Reading, value: Tensor, share: Tensor) -> None:
        if isinstance(reading, readings.Entropy):
            own = share
            if reading.normalized:
                many, largest = kernel.largest_entropy(self.inputs)
                own = torch.where(many, share / largest, 0)
            self.entropy = _sum(self.entropy, own)
            # Of -(ln p + 1): the weights of a row sum to 1 less its sink's.
            self.terms += own * (sink_weights(self.inputs.problem, self.lse) - 1)
        elif isinstance(reading, readings.Distance):
            self.distance = _sum(self.distance, share)
        elif isinstance(reading, readings.Mass):
            edges, before = self.masses.get(reading, (None, None))
            edges = edges or kernel.ReadEdges(self.inputs, reading.edges)
            self.masses[reading] = edges, _sum(before, share)
        self.terms += share * value

    def _add_top(self, value: Any, share: Tensor) -> None:
        weights, share = self._flat(value.weights), self._flat(share)
        real = value.sources >= 0
        sources = value.sources.reshape(weights.shape)
        self.tops.append((torch.where(real.reshape(weights.shape), share, 0), sources))
        self.terms += (self.tops[-1][0] * weights).sum(-1)

    def _add_cells(self, reading: readings.BlockMap, share: Tensor) -> None:
        cells = [
            kernel.cuts(size, min(reading.cells, size)) for size in (self.shape[2], self.source)
        ]
        change = share / (cells[0].diff()[:, None] * cells[1].diff())
        before = None if self.cells is None else self.cells[2]
        self.cells = (*cells, _sum(before, change))

    def _map(self) -> tuple[Tensor, Tensor]:
        """Which row of the second tensor holds the gradient of a query's weights, -1 for none."""
        query = self.shape[2]
        if len(self.maps) == 1 and isinstance(self.maps[0][0], readings.Weights):
            return torch.arange(query, dtype=torch.int32), self.maps[0][1]
        row_of, count = kernel.row_numbers([reading for reading, _ in self.maps], query)
        total = torch.zeros(*self.shape[:2], count, self.source, dtype=torch.float32)
        for reading, share in self.maps:
            rows = row_of[list(kernel.queries_of(reading, query))]
            total.index_add_(2, rows.long(), share)
        return row_of, total

    def _asks(self) -> list[tuple[Any, ...]]:
        """The kernel's setters with their arguments."""
        asks: list[tuple[Any, ...]] = [("set_row_terms", self.terms)]
        if self.entropy is not None:
            asks.append(("set_entropy_grad", self.entropy))
        if self.distance is not None:
            asks.append(("set_distance_grad", self.distance, self.source - self.shape[2]))
        if self.scores is not None:
            asks.append(("set_scores_grad", self.scores))
        if self.received is not None:
            asks.append(("set_received_grad", self.received))
        if self.maps and self.overlap is None:
            row_of, total = self._map()
            asks.append(("set_rows_grad", row_of, total.shape[2], total))
        if self.cells is not None:
            counts = (len(x) - 1 for x in self.cells[:2])
            asks.append(("set_cells_grad", *counts, *self.cells))
        if self.tops:
            shares, sources = (torch.cat(x, -1) for x in zip(*self.tops, strict=True))
            asks.append(("set_top_grad", shares.shape[-1], shares, sources))
        return asks

    def split(self, parts: list[range]) -> list[range]:
        """Parts of few enough queries."""
        for edges, _ in self.masses.values():
            parts = edges.split(parts)
        return parts if self.overlap is None else overlap.split(self.inputs, parts)

    def tell(self, call: Any, part: range) -> None:
        """Tell a kernel call on some of the queries where the numbers are."""
        if self.asked is None:
            self.asked = self._asks()
        for name, *given in self.asked:
            getattr(call, name)(*(x.data_ptr() if isinstance(x, Tensor) else x for x in given))
        for edges, change in self.masses.values():
            edges.tell(call, part)
            call.add_mass_grad(change.data_ptr())
        if self.overlap is not None:
            self.overlap.tell(call, part, self._map() if self.maps else None)


def _sum(total: Tensor | None, x: Tensor) -> Tensor:
    return x if total is None else total + x


def sink_weights(problem: Problem, lse: Tensor) -> Tensor | float:
    """The weight of each row's sink, 0 where there is none."""
    if problem.sinks is None:
        return 0.0
    weight = (problem.sinks.float()[:, None] - lse).exp()
    # In an empty row whose sink is -inf, inf - inf: it has no weight to give.
    return torch.where(weight.isfinite(), weight, 0)
