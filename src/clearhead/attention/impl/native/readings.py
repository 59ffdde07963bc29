"""The readings that the kernel supports: two classes and one line of a table for each.

An `Output` is what the kernel fills, a `Grad` what it takes in. The gradient of a score is
p_ij (x_ij - sum_k p_ik x_ik), where x_ij is that of the weight p_ij: grad . value for the context,
and for a reading a few numbers a row or a source, which the kernel adds to each tile. The sum over
a row is known from the reading's value, or found by the kernel in a pass of its own. The gradient
of scores is added to that of each score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead import readings
from clearhead.attention.impl.native.base import Grad, Output, Sums, total
from clearhead.attention.impl.native.call import Inputs, ReadEdges, new
from clearhead.attention.impl.native.maps import OverlapGrad, Rows, RowsGrad, ScoresGrad
from clearhead.attention.problem import Problem
from clearhead.readings import BlockMapValue, Reading, TopKValue, cell_bounds

__all__ = ["KINDS", "sink_weights", "supported", "supported_grads"]

# Edges that are counted at a time: torch sums bools in a copy of 8 bytes each.
COUNTED = 1 << 18


class LogSumExp(Output):
    """The log-sum-exp of each row."""

    def __init__(self, inputs: Inputs, read: list[Any]):
        super().__init__(inputs, read)
        self.lse = new(*inputs.shape)

    def bind(self, call: Any, part: range) -> None:
        call.set_lse(self.lse.data_ptr())

    def value(self, reading: Any) -> Tensor:
        return self.lse


class LogSumExpGrad(Grad):
    """The gradient of the log-sum-exp, which is one term of each row."""

    def add(self, reading: Any, value: Any, grad: Tensor) -> None:
        self.terms -= self.flat(grad)

    def bind(self, call: Any, part: range, grads: dict[Any, Any]) -> None:
        # The kernel needs nothing but the terms.
        pass


class MaxScore(Output):
    """The largest score of each row. Its gradient is the fallback's."""

    def __init__(self, inputs: Inputs, read: list[Any]):
        super().__init__(inputs, read)
        self.largest = new(*inputs.shape)

    def bind(self, call: Any, part: range) -> None:
        call.set_max_score(self.largest.data_ptr())

    def value(self, reading: Any) -> Tensor:
        return self.largest


class Entropy(Output):
    """The entropy of each row; Python divides by its largest possible value."""

    def __init__(self, inputs: Inputs, read: list[Any]):
        super().__init__(inputs, read)
        self.entropy = new(*inputs.shape)

    @staticmethod
    def supports(inputs: Inputs, reading: readings.Entropy) -> bool:
        # A bias may block further sources.
        return not reading.normalized or inputs.problem.bias is None

    def bind(self, call: Any, part: range) -> None:
        call.set_entropy(self.entropy.data_ptr())

    def value(self, reading: readings.Entropy) -> Tensor:
        if not reading.normalized:
            return self.entropy
        many, largest = _largest_entropy(self.inputs)
        return torch.where(many | self.entropy.isnan(), self.entropy / largest, 0)


class EntropyGrad(Grad):
    """The gradient of the entropies, normalized or not."""

    needs_value = True
    grad: Tensor | None = None

    def add(self, reading: readings.Entropy, value: Tensor, grad: Tensor) -> None:
        value, grad = self.flat(value), self.flat(grad)
        own = grad
        if reading.normalized:
            many, largest = _largest_entropy(self.inputs)
            own = torch.where(many, grad / largest, 0)
        self.grad = total(self.grad, own)
        # Of -(ln p + 1): the weights of a row sum to 1 less its sink's.
        self.terms += own * (sink_weights(self.inputs.problem, self.lse) - 1)
        self.terms += grad * value

    def bind(self, call: Any, part: range, grads: dict[Any, Any]) -> None:
        assert self.grad is not None
        call.set_entropy_grad(self.grad.data_ptr())


def _largest_entropy(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Where a row has more than one source, and the log of the number of its sources."""
    count = _count(inputs)
    many = count > 1
    return many, torch.where(many, count, 2).to(torch.float32).log()


def _count(inputs: Inputs) -> Tensor:
    """The number of sources that each row may read by the mask."""
    mask, sizes, query = inputs.problem.mask, inputs.problem.sizes, inputs.shape[2]
    if mask is None:
        return torch.tensor(inputs.source)
    if inputs.ranges is not None and len(inputs.ranges.start) == 1:
        start, stop = inputs.ranges.start[0], inputs.ranges.stop[0]
        return stop.clamp(0, inputs.source) - start.clamp(0, inputs.source)
    step = max(1, COUNTED // ((mask.own.batch or 1) * (mask.own.head or 1) * inputs.source))
    parts = (range(i, min(i + step, query)) for i in range(0, query, step))
    return torch.cat([_count_edges(mask.strip(x, sizes), len(x), sizes.source) for x in parts], -1)


def _count_edges(edges: Tensor, rows: int, source: int) -> Tensor:
    """The edges of each row, counted once where heads or rows share their memory."""
    own = edges[tuple(slice(1) if step == 0 else slice(None) for step in edges.stride()[:3])]
    count = own.sum(-1) * (source // own.shape[-1])
    return count.expand(*edges.shape[:2], rows)


def sink_weights(problem: Problem, lse: Tensor) -> Tensor | float:
    """The weight of each row's sink, 0 where there is none."""
    if problem.sinks is None:
        return 0.0
    weight = (problem.sinks.float()[:, None] - lse).exp()
    # An empty row whose sink is -inf has inf - inf here: its sink has no weight.
    return torch.where(weight.isfinite(), weight, 0)


class Distance(Output):
    """The mean distance of each row."""

    def __init__(self, inputs: Inputs, read: list[Any]):
        super().__init__(inputs, read)
        self.distance = new(*inputs.shape)

    def bind(self, call: Any, part: range) -> None:
        call.set_distance(self.distance.data_ptr(), self.inputs.source - self.inputs.shape[2])

    def value(self, reading: Any) -> Tensor:
        return self.distance


class DistanceGrad(Grad):
    """The gradient of the mean distances."""

    needs_value = True
    grad: Tensor | None = None

    def add(self, reading: Any, value: Tensor, grad: Tensor) -> None:
        value, grad = self.flat(value), self.flat(grad)
        self.grad = total(self.grad, grad)
        self.terms += grad * value

    def bind(self, call: Any, part: range, grads: dict[Any, Any]) -> None:
        assert self.grad is not None
        offset = self.inputs.source - self.inputs.shape[2]
        call.set_distance_grad(self.grad.data_ptr(), offset)


class Mass(Output):
    """The mass on one set of edges: a kernel call has room for no more."""

    several = False

    def __init__(self, inputs: Inputs, read: list[Any]):
        super().__init__(inputs, read)
        self.mass, self.edges = new(*inputs.shape), ReadEdges(inputs, read[0].edges)

    def split(self, parts: list[range]) -> list[range]:
        return self.edges.split(parts)

    def bind(self, call: Any, part: range) -> None:
        call.set_mass(self.mass.data_ptr())
        self.edges.bind(call, part)

    def value(self, reading: Any) -> Tensor:
        return self.mass


class MassGrad(Grad):
    """The gradients of any number of masses."""

    needs_value = any_value = True

    def __init__(self, inputs: Inputs, lse: Tensor, terms: Tensor):
        super().__init__(inputs, lse, terms)
        self.grads: dict[Reading, tuple[ReadEdges, Tensor]] = {}

    def add(self, reading: readings.Mass, value: Tensor, grad: Tensor) -> None:
        value, grad = self.flat(value), self.flat(grad)
        edges, before = self.grads.get(reading, (None, None))
        edges = edges or ReadEdges(self.inputs, reading.edges)
        self.grads[reading] = edges, total(before, grad)
        self.terms += grad * value

    def split(self, parts: list[range]) -> list[range]:
        for edges, _ in self.grads.values():
            parts = edges.split(parts)
        return parts

    def bind(self, call: Any, part: range, grads: dict[Any, Any]) -> None:
        for edges, grad in self.grads.values():
            edges.bind(call, part)
            call.add_mass_grad(grad.data_ptr())


class TopK(Output):
    """The largest weights of each row, as many as the largest k; a smaller k is a slice."""

    def __init__(self, inputs: Inputs, read: list[Any]):
        super().__init__(inputs, read)
        shape = (*inputs.shape, max(reading.k for reading in read))
        self.weights, self.sources = new(*shape), torch.empty(shape, dtype=torch.int64)

    def bind(self, call: Any, part: range) -> None:
        call.set_top(self.weights.shape[-1], self.weights.data_ptr(), self.sources.data_ptr())

    def value(self, reading: readings.TopK) -> TopKValue:
        return TopKValue(*(x[..., : reading.k] for x in (self.weights, self.sources)))


class TopKGrad(Grad):
    """The gradients of the largest weights, at the sources that have them."""

    needs_value = True

    def __init__(self, inputs: Inputs, lse: Tensor, terms: Tensor):
        super().__init__(inputs, lse, terms)
        self.grads: list[tuple[Tensor, Tensor]] = []
        self.whole: tuple[Tensor, Tensor] | None = None

    def add(self, reading: Any, value: TopKValue, grad: TopKValue) -> None:
        weights, sources = self.flat(value.weights), value.sources
        sources = sources.reshape(weights.shape)
        own = torch.where(sources >= 0, self.flat(grad.weights), 0)
        self.grads.append((own, sources))
        self.terms += (own * weights).sum(-1)

    def bind(self, call: Any, part: range, grads: dict[Any, Any]) -> None:
        if self.whole is None:
            grad, sources = zip(*self.grads, strict=True)
            self.whole = torch.cat(grad, -1), torch.cat(sources, -1)
        grad, sources = self.whole
        call.set_top_grad(grad.shape[-1], grad.data_ptr(), sources.data_ptr())


class Received(Output):
    """The weight that each source receives, summed over the accumulators last."""

    def __init__(self, inputs: Inputs, read: list[Any]):
        super().__init__(inputs, read)
        self.received = Sums(inputs, inputs.source)
        self.slots = self.received.slots

    def split(self, parts: list[range]) -> list[range]:
        return self.received.split(parts)

    def bind(self, call: Any, part: range) -> None:
        call.set_received(self.received.begin())

    def value(self, reading: Any) -> Tensor:
        return self.received.value()


class ReceivedGrad(Grad):
    """The gradient of what the sources receive."""

    grad: Tensor | None = None

    def add(self, reading: Any, value: Any, grad: Tensor) -> None:
        self.grad = total(self.grad, self.flat(grad))

    def bind(self, call: Any, part: range, grads: dict[Any, Any]) -> None:
        assert self.grad is not None
        call.set_received_grad(self.grad.data_ptr())


class BlockMap(Output):
    """Sum and largest weight of each tile, of one block map: a kernel call has room for no more."""

    several = False

    def __init__(self, inputs: Inputs, read: list[Any]):
        super().__init__(inputs, read)
        self.down, self.across = _cells(inputs, read[0])
        self.sums = Sums(inputs, len(self.down) - 1, len(self.across) - 1)
        self.largest, self.slots = torch.zeros_like(self.sums.each), self.sums.slots

    def split(self, parts: list[range]) -> list[range]:
        return self.sums.split(parts)

    def bind(self, call: Any, part: range) -> None:
        places = (x.data_ptr() for x in (self.down, self.across))
        call.set_cells(
            *self.largest.shape[-2:], *places, self.sums.begin(), self.largest.data_ptr()
        )

    def value(self, reading: Any) -> BlockMapValue:
        edges = _edges_in(self.down, self.across)
        return BlockMapValue(self.sums.value() / edges, self.largest.amax(0))


class BlockMapGrad(Grad):
    """The gradient of the mean of each tile; the largest weight has none."""

    grad: Tensor | None = None

    def add(self, reading: readings.BlockMap, value: Any, grad: BlockMapValue) -> None:
        self.down, self.across = _cells(self.inputs, reading)
        edges = _edges_in(self.down, self.across)
        self.grad = total(self.grad, self.flat(grad.mean) / edges)

    def bind(self, call: Any, part: range, grads: dict[Any, Any]) -> None:
        assert self.grad is not None
        tensors = self.down, self.across, self.grad
        call.set_cells_grad(*self.grad.shape[-2:], *(x.data_ptr() for x in tensors))


def _cells(inputs: Inputs, reading: readings.BlockMap) -> list[Tensor]:
    """Where the cells of the queries and of the sources begin, and where the last ones end."""
    sizes = inputs.shape[2], inputs.source
    return [torch.tensor(cell_bounds(n, reading.cells), dtype=torch.int32) for n in sizes]


def _edges_in(down: Tensor, across: Tensor) -> Tensor:
    """How many edges each cell has, which may be more than an int32 holds."""
    return down.diff().long()[:, None] * across.diff()


class Kind(NamedTuple):
    """How the kernel computes a reading and takes in its gradient; None where the fallback does."""

    output: type[Output] | None
    grad: type[Grad] | None


KINDS: dict[type[Reading], Kind] = {
    readings.LogSumExp: Kind(LogSumExp, LogSumExpGrad),
    readings.MaxScore: Kind(MaxScore, None),
    readings.Entropy: Kind(Entropy, EntropyGrad),
    readings.Distance: Kind(Distance, DistanceGrad),
    readings.Mass: Kind(Mass, MassGrad),
    readings.TopK: Kind(TopK, TopKGrad),
    readings.Received: Kind(Received, ReceivedGrad),
    readings.BlockMap: Kind(BlockMap, BlockMapGrad),
    readings.Rows: Kind(Rows, RowsGrad),
    readings.Weights: Kind(Rows, RowsGrad),
    readings.Scores: Kind(None, ScoresGrad),
    readings.Overlap: Kind(None, OverlapGrad),
}


def supported(inputs: Inputs, read: Sequence[Reading]) -> list[Reading]:
    """The readings whose values the kernel computes in one call."""
    found, kinds = [], set()
    for reading in read:
        kind = KINDS.get(type(reading))
        if kind is None or kind.output is None or not kind.output.supports(inputs, reading):
            continue
        if kind.output.several or kind not in kinds:
            kinds.add(kind)
            found.append(reading)
    return found


def supported_grads(inputs: Inputs, read: Sequence[Reading]) -> set[Reading]:
    """The readings whose gradients the kernel takes in."""
    ours, grads = (
        supported(inputs, read),
        {r: KINDS[type(r)].grad for r in read if type(r) in KINDS},
    )
    return {r for r, grad in grads.items() if grad is not None and (r in ours or grad.any_value)}
