"""Which queries of a call count, and what the mask says of each: sources, and its own edge.

A query counts where it may attend to at least one source. In self-attention with as many sources as
queries, a position whose source no query of its sample may read is padding, and its query does not
count either. That rule needs a mask that holds data: a mask of positions alone pads nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead._capture import FusedCall
from clearhead.masks import Mask

__all__ = ["Counted", "KnownRows", "widest"]

# Edges that are tested at a time.
_EDGES = 1 << 22
# How many sizes of masks of positions are kept.
_KNOWN = 256


class Counted(NamedTuple):
    """What the mask says of the queries; all broadcast to (batch, head, query)."""

    counts: Tensor  # how many sources each may read
    own: Tensor  # whether it may read its own position
    first: Tensor  # whether it may read each of the first sources, on one more axis
    largest: Tensor  # the log of how many sources it may read, of two at least
    real: Tensor | None  # whether it counts; None where all do

    def part(self, first: int, queries: int) -> Counted:
        """Keep some queries."""
        at = slice(first, first + queries)
        edges = self.first if self.first.shape[-2] == 1 else self.first[..., at, :]
        counts, own, largest = (x[..., at] for x in (self.counts, self.own, self.largest))
        return Counted(
            counts, own, edges, largest, None if self.real is None else self.real[..., at]
        )


def widest(device: torch.device) -> torch.dtype:
    """Give the widest dtype of floats that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


class KnownRows:
    """The rows of the masks that were met: layers share masks, and so do steps."""

    def __init__(self, sinks: int) -> None:
        self._sinks = sinks
        self._relative: dict[tuple, Counted] = {}
        # The masks and tensors stay alive as long as their addresses are keys.
        self._others: dict[tuple, tuple[object, Counted]] = {}

    def forget(self) -> None:
        """Forget the masks that hold data: they change from step to step."""
        self._others.clear()

    def of(self, call: FusedCall) -> Counted:
        """Give the rows of a call."""
        if call.spread is not None:
            return self.of(call.of_all_ranks()).part(call.spread.first, call.sizes.query)
        mask, sizes = call.mask, call.sizes
        key = (sizes.query, sizes.source, call.device)
        bias = call.bias if call.how != "sdpa" else None
        if bias is None and (mask is None or mask.relative):
            if len(self._relative) > _KNOWN:
                self._relative.clear()
            key = (mask, *key)
            found = self._relative.get(key)
            if found is None:
                found = self._relative[key] = _of_positions(call, self._sinks)
            return found
        tensors = [] if mask is None else mask.tensors()
        tensors += [] if bias is None else [bias]
        places = [(x.data_ptr(), x.shape, x.stride(), x._version) for x in tensors]
        key = (_kind(mask), call.kind, *sizes, *map(tuple, places))
        if key not in self._others:
            self._others[key] = ((mask, tensors), _of_data(call, bias, self._sinks))
        return self._others[key][1]


def _kind(mask: Mask | None) -> object:
    """What tells masks apart whose tensors are the same: dense masks are no more than those."""
    dense = mask is not None and mask.stored
    return type(mask) if mask is None or dense else id(mask)


def _of_positions(call: FusedCall, sinks: int) -> Counted:
    """Of a mask that knows positions only."""
    query, source = call.sizes[2:]
    if call.mask is None:
        counts = torch.full((1, 1, query), source, device=call.device)
        at = torch.arange(query, device=call.device) + (source - query)
        own = (at >= 0).expand(1, 1, -1)
        return _counted(call, sinks, counts, own, None if source else counts > 0)
    rows = _of_data(call, None, sinks, padded=False)
    everywhere = rows.real is None or bool(rows.real.all())
    return rows._replace(real=None) if everywhere else rows


def _of_data(call: FusedCall, bias: Tensor | None, sinks: int, padded: bool = True) -> Counted:
    query, source = call.sizes[2:]
    found = None
    if bias is None and call.mask is not None:
        found = call.mask.intervals(query, source, call.device)
    counts, own, read = _tested(call, bias) if found is None else _of_intervals(*found, source)
    real = counts > 0
    if padded and call.kind == "self" and query == source:
        # A sample is padded alike for all heads.
        real = real & read.any(1, keepdim=True)
    return _counted(call, sinks, counts, own, real)


def _counted(
    call: FusedCall, sinks: int, counts: Tensor, own: Tensor, real: Tensor | None
) -> Counted:
    at = torch.arange(call.sizes.query, device=call.device)
    first = torch.arange(min(sinks, call.sizes.source), device=call.device)
    if call.mask is None:
        edges = torch.ones(1, 1, 1, len(first), dtype=torch.bool, device=call.device)
    else:
        edges = call.mask.tile(at, first, call.sizes)
    largest = counts.clamp(min=2).to(widest(call.device)).log()
    return Counted(counts, own, edges, largest, real)


def _of_intervals(start: Tensor, stop: Tensor, source: int) -> tuple[Tensor, Tensor, Tensor]:
    """Number of sources, own edge and whether each source is read, of one interval a query."""
    start, stop = torch.broadcast_tensors(start, stop)
    lead = start.shape if start.ndim == 3 else (1, 1, *start.shape)
    start, stop = start.clamp(0, source).reshape(lead), stop.clamp(0, source).reshape(lead)
    stop = torch.maximum(start, stop)
    at = torch.arange(lead[-1], device=start.device) + (source - lead[-1])
    changes = start.new_zeros(*lead[:2], source + 1)
    changes.scatter_add_(-1, start, torch.ones_like(start))
    changes.scatter_add_(-1, stop, -torch.ones_like(stop))
    read = changes.cumsum(-1)[..., :source] > 0
    return stop - start, (start <= at) & (at < stop), read


def _tested(call: FusedCall, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The same of any edges, which are tested some queries at a time."""
    _, _, query, source = call.sizes
    columns = torch.arange(source, device=call.device)
    counts, own, read = [], [], None
    size = _lead(call, bias)
    step = max(1, _EDGES // max(source * size[0] * size[1], 1))
    for rows in torch.arange(query, device=call.device).split(step):
        edges = _edges(call, bias, rows, columns)
        counts.append(edges.sum(-1))
        own.append(_own(edges, rows + (source - query)))
        some = edges.any(-2)
        read = some if read is None else read | some
    assert read is not None
    return torch.cat(counts, -1), torch.cat(own, -1), read


def _lead(call: FusedCall, bias: Tensor | None) -> tuple[int, int]:
    own = (1, 1) if call.mask is None else (call.mask.own.batch or 1, call.mask.own.head or 1)
    shape = own if bias is None else bias.shape[:2]
    return max(own[0], shape[0]), max(own[1], shape[1])


def _edges(call: FusedCall, bias: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    """The allowed edges of some rows, (batch or 1, head or 1, rows, source)."""
    edges = torch.ones(1, 1, len(rows), len(columns), dtype=torch.bool, device=rows.device)
    if call.mask is not None:
        edges = edges & call.mask.tile(rows, columns, call.sizes)
    if bias is not None:
        edges = edges & (bias[..., rows, :] != -torch.inf)
    return edges


def _own(edges: Tensor, at: Tensor) -> Tensor:
    """Whether each row has the edge to a source of its own, which may not be there."""
    if not edges.shape[-1]:
        return edges.any(-1)
    inside = edges.gather(-1, at.clamp(min=0)[:, None].expand(*edges.shape[:-1], 1))[..., 0]
    return inside & (at >= 0)
