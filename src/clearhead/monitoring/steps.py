"""The numbers of one step: of a forward, of the forwards that add up to it, and of all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.monitoring.packs import CallSums
from clearhead.monitoring.statistics import STATISTICS

__all__ = ["HeadSums", "Layer", "Layers", "TrainingStep", "over_ranks"]


class Layer(NamedTuple):
    """An attention module of the model, and how many heads its calls have."""

    module: str
    heads: int


class Layers:
    """The attention modules in the order of their first calls, which number the layers."""

    def __init__(self) -> None:
        self.numbers: dict[Layer, int] = {}

    def number(self, module: str, heads: int) -> int:
        """Give the number of a layer, a new one where it was not met before."""
        return self.numbers.setdefault(Layer(module, heads), len(self.numbers))

    @property
    def heads(self) -> int:
        """The largest number of heads."""
        return max((layer.heads for layer in self.numbers), default=0)


class HeadSums(NamedTuple):
    """Of each layer and head the largest score, and sums over the queries."""

    most: Tensor  # (layer, head), NaN where a layer has no such head
    sums: Tensor  # (layer, head, statistic but the first), 0 there

    @staticmethod
    def of(calls: list[CallSums], layers: Layers) -> HeadSums | None:
        """Collect the calls of a forward, those of a layer added up; None where there are none."""
        if not calls:
            return None
        shape = (len(layers.numbers), layers.heads)
        first = calls[0]
        if len(calls) == 1 and first.layers == list(range(shape[0])) and first.most.shape == shape:
            return HeadSums(first.most, first.sums)
        most = first.most.new_full(shape, -torch.inf)
        sums = first.sums.new_zeros(*shape, len(STATISTICS) - 1)
        for call in calls:
            for number, layer in enumerate(call.layers):
                at = layer, slice(call.heads.start, call.heads.stop)
                most[at] = torch.maximum(most[at], call.most[number].to(most.device))
                sums[at] += call.sums[number].to(most.device)
        return HeadSums(most, sums)

    def plus(self, other: HeadSums) -> HeadSums:
        """Add the numbers of another forward, in which there may be more layers."""
        mine, others = self._grown(*other.most.shape), other._grown(*self.most.shape)
        others = HeadSums(*(x.to(mine.most.device) for x in others))
        return HeadSums(torch.maximum(mine.most, others.most), mine.sums + others.sums)

    def _grown(self, layers: int, heads: int) -> HeadSums:
        down, across = (
            max(0, n - size) for n, size in zip((layers, heads), self.most.shape, strict=True)
        )
        pad = torch.nn.functional.pad
        most = pad(self.most, (0, across, 0, down), value=-torch.inf)
        return HeadSums(most, pad(self.sums, (0, 0, 0, across, 0, down)))

    def values(self) -> Tensor:
        """Give (layer, head, statistic): NaN for heads that no query was counted of."""
        rows = self.sums[..., -1:]
        means = torch.where(rows > 0, self.sums[..., :-1] / rows.clamp(min=1), torch.nan)
        # A maximum may have lost a NaN, which the sums have kept.
        most = self.most.masked_fill(self.sums[..., 0].isnan() | (rows[..., 0] == 0), torch.nan)
        return torch.cat([most.unsqueeze(-1), means, rows], -1)


class TrainingStep:
    """The numbers of a step, to which the forwards of gradient accumulation add up."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._totals: HeadSums | None = None
        self._values: Tensor | None = None
        self._host: Any = None

    def add(self, totals: HeadSums) -> None:
        """Add a forward, and begin to copy the numbers from an accelerator, without waiting."""
        self._totals = totals if self._totals is None else self._totals.plus(totals)
        self._values = self._host = None
        if self._totals.most.is_cuda:
            place = torch.empty(self.values.shape, dtype=self.values.dtype, pin_memory=True)
            place.copy_(self.values, non_blocking=True)
            self._host = place, torch.cuda.current_stream(self.values.device).record_event()

    @property
    def values(self) -> Tensor:
        """The numbers, (layer, head, statistic), on their device; worked out where asked for."""
        assert self._totals is not None
        if self._values is None:
            self._values = self._totals.values()
        return self._values

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        assert self._totals is not None
        return self._totals.most.device

    @property
    def read(self) -> bool:
        """Whether a forward was read."""
        return self._totals is not None

    @property
    def host(self) -> Tensor:
        """The values on the CPU; of a CUDA device only the forward is waited for."""
        if self._host is None:
            return self.values.cpu()
        place, event = self._host
        event.synchronize()
        return place


def over_ranks(totals: HeadSums, agreed: set[torch.Size]) -> HeadSums:
    """Reduce over the ranks of the default process group, with one all-reduce.

    It adds: the sums, and maxima of which each rank has a row of its own, of zeros elsewhere.
    Heads that other ranks hold have no rows here, and samples add up. `agreed` has the shapes that
    all ranks had before. The numbers are those of this process where there is no group.
    """
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not there or torch.distributed.get_world_size() == 1:
        return totals
    most, sums = (x.contiguous() for x in totals)
    if most.shape not in agreed:
        _check_shapes(most)
        agreed.add(most.shape)
    rows = most.new_zeros(torch.distributed.get_world_size(), most.numel())
    rows[torch.distributed.get_rank()] = most.flatten()
    packed = torch.cat([rows.flatten(), sums.flatten()])
    torch.distributed.all_reduce(packed)
    maxima, added = packed.split([rows.numel(), sums.numel()])
    return HeadSums(maxima.view_as(rows).amax(0).view_as(most), added.view_as(sums))


def _check_shapes(most: Tensor) -> None:
    """Raise on every rank where some read other layers: a reduction would mix their numbers."""
    mine = torch.tensor(most.shape, device=most.device)
    each = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(each, mine)
    for rank, other in enumerate(each):
        if not torch.equal(other, each[0]):
            first, here = (" layers of up to ".join(map(str, x.tolist())) for x in (each[0], other))
            raise RuntimeError(
                f"monitor: rank 0 reads {first} heads, rank {rank} {here}: not one model\n"
                "  to do: monitor models whose ranks run the same layers, not stages of a pipeline"
            )
