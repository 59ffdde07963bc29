"""The sources of each query as ranges, start to stop: what a kernel takes in place of a map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from clearhead._core import readable

# Bools that are examined at a time.
ROWS_BYTES = 1 << 18

# Start and stop of one range for each query: (query,), or (batch or 1, head or 1, query).
Interval = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Ranges:
    """The ranges of each query's sources; a source that lies in any of them is allowed.

    Both tensors are int32, contiguous, (range, batch or 1, head or 1, query).
    """

    start: Tensor
    stop: Tensor

    @staticmethod
    def of(union: Sequence[Interval]) -> Ranges:
        """Store a union of intervals the way a kernel reads it."""
        lifted = [_broadcast([_with_lead(x) for x in interval]) for interval in union]
        starts, stops = zip(*lifted, strict=True)
        return Ranges(_stack(starts), _stack(stops))

    @cached_property
    def address(self) -> tuple[int, ...]:
        """Addresses of start and stop, the number of ranges, the strides of range, batch and head.

        A stride is 0 where all samples or heads have the same ranges. The addresses are valid while
        this object lives.
        """
        count, batch, head, query = self.start.shape
        per_sample = query * head if batch > 1 else 0
        strides = (batch * head * query, per_sample, query if head > 1 else 0)
        return self.start.data_ptr(), self.stop.data_ptr(), count, *strides

    def address_from(self, query: int) -> tuple[int, ...]:
        """The address of the ranges of query number `query` and those after it."""
        start, stop, *layout = self.address
        offset = query * self.start.element_size()
        return start + offset, stop + offset, *layout


def tidy(start: Tensor, stop: Tensor, source: int) -> Interval:
    """Clamp an interval to the sources, with stop == start where a row is empty."""
    start, stop = start.clamp(0, source), stop.clamp(0, source)
    return start, torch.maximum(start, stop)


def runs(real: Tensor) -> Interval | None:
    """Start and stop of the one run of True in every row (last axis), or None."""
    if not readable(real):
        return None
    size = real.shape[-1]
    if not size:
        zero = torch.zeros(real.shape[:-1], dtype=torch.int64, device=real.device)
        return zero, zero
    # Rows that share their memory are one row, and a sum of bools copies them to int64: few rows at
    # a time take little memory.
    own = real[tuple(slice(1) if step == 0 else slice(None) for step in real.stride()[:-1])]
    found = []
    for rows in own.reshape(-1, size).split(max(1, ROWS_BYTES // size)):
        many = rows.sum(-1)
        start = rows.view(torch.uint8).argmax(-1)
        last = size - 1 - rows.flip(-1).view(torch.uint8).argmax(-1)
        if ((many > 0) & (last - start + 1 != many)).any():
            return None
        found.append(torch.stack([start, start + many]))
    start, stop = torch.cat(found, -1).view(2, *own.shape[:-1]).expand(2, *real.shape[:-1])
    return start, stop


def spans(ids: Tensor) -> Interval | None:
    """Start and stop of each position's run of equal ids (batch, position), if no id comes back."""
    many, size = ids.shape
    index = torch.arange(size, device=ids.device).expand(many, size)
    if not size:
        return index, index
    change = ids[:, 1:] != ids[:, :-1]
    edge = change.new_ones(many, 1)
    starts = torch.cat([edge, change], -1)
    # An id that comes back has more runs than there are different ids.
    ordered = ids.sort(-1).values
    if not torch.equal((ordered[:, 1:] != ordered[:, :-1]).sum(-1), change.sum(-1)):
        return None
    start = torch.where(starts, index, 0).cummax(-1).values
    stops = torch.where(torch.cat([change, edge], -1), index + 1, size)
    return start, stops.flip(-1).cummin(-1).values.flip(-1)


def hull(interval: Interval, source: int) -> Tensor:
    """The sources from the first to the last that lie in any interval."""
    start, stop = tidy(*interval, source)
    there = start < stop
    if not there.any():
        return torch.zeros(0, dtype=torch.int64)
    return torch.arange(int(start[there].min()), int(stop[there].max()))


def ascend(positions: Tensor) -> bool:
    """Whether positions are known to ascend, each there once."""
    return readable(positions) and bool((positions[1:] > positions[:-1]).all())


def tile_of_pairs(queries: Tensor, sources: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return which of these rows and columns, which ascend, are among the (query, source) pairs."""
    tile = torch.zeros(len(rows), len(columns), dtype=torch.bool, device=rows.device)
    at = [torch.searchsorted(rows, queries), torch.searchsorted(columns, sources)]
    at = [place.clamp(max=size - 1) for place, size in zip(at, tile.shape, strict=True)]
    found = (rows[at[0]] == queries) & (columns[at[1]] == sources)
    tile[at[0][found], at[1][found]] = True
    return tile


def ordered(ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The ids of each sample, (position,) or (batch, position), ascending, and where they stand."""
    return [(found.values, found.indices) for found in map(torch.sort, torch.atleast_2d(ids))]


def carriers(wanted: Tensor, order: tuple[Tensor, Tensor]) -> Tensor:
    """The positions of some ids; `order` has all ids ascending, and where each stands."""
    ids, places = order
    wanted = wanted.unique()
    first, last = (torch.searchsorted(ids, wanted, right=right) for right in (False, True))
    many = last - first
    before = (first - (many.cumsum(0) - many)).repeat_interleave(many)
    return places[before + torch.arange(len(before), device=before.device)]


def complement(interval: Interval, source: int) -> list[Interval]:
    """The sources before and after an interval."""
    start, stop = interval
    # An empty interval may lie anywhere; its complement is everything.
    empty = stop <= start
    start, stop = start.masked_fill(empty, 0), stop.masked_fill(empty, 0)
    return [(torch.zeros_like(start), start), (stop, torch.full_like(stop, source))]


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The intersection of two unions of intervals."""
    pairs = [(a, b) for a in left for b in right]
    return [(torch.maximum(a[0], b[0]), torch.minimum(a[1], b[1])) for a, b in pairs]


def union(left: Interval, right: Interval) -> Interval | None:
    """The union of two tidy intervals where it is one in every row, else None."""
    (a, b), (c, d) = left, right
    touching = (torch.maximum(a, c) <= torch.minimum(b, d)) | (a == b) | (c == d)
    if not readable(touching) or not touching.all():
        return None
    start = torch.where(a == b, c, torch.where(c == d, a, torch.minimum(a, c)))
    return start, torch.where(a == b, d, torch.where(c == d, b, torch.maximum(b, d)))


def other_side(interval: Interval, source: int) -> Interval | None:
    """The complement of a tidy interval where it is one interval in every row, else None."""
    start, stop = interval
    empty, last = start == stop, stop == source
    one_side = empty | last | (start == 0)
    if not readable(one_side) or not one_side.all():
        return None
    zero = torch.zeros_like(start)
    begin = torch.where(empty | last, zero, stop)
    return begin, torch.where(last & ~empty, start, zero + source)


def _with_lead(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x[None, None]


def _broadcast(pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    # torch.broadcast_tensors takes 5 us even where all shapes are equal.
    same = all(x.shape == pieces[0].shape for x in pieces)
    return pieces if same else torch.broadcast_tensors(*pieces)


def _stack(pieces: Sequence[Tensor]) -> Tensor:
    pieces = _broadcast(pieces)
    whole = pieces[0][None] if len(pieces) == 1 else torch.stack(list(pieces))
    return whole.to(torch.int32).contiguous()
