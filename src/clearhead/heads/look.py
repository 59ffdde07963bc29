"""The weight over several sets of edges at once: one sparse sum, instead of a pass for each set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.heads.batch import Batch
from clearhead.readings import Overlap, Reading, Strip

__all__ = ["CORNER", "LOCAL", "NAMES", "Look", "Looked"]

# How far away a source still counts as local.
LOCAL = 8
# Rows and columns of the corner of the map in which variability is measured.
CORNER = 16
# Numbers in a cache line.
LINE = 16
# The sets of edges, in the order of their sums.
NAMES = ("self", "previous", "duplicate", "induction", "precursor", "sink", "local")


class Looked(NamedTuple):
    """What `Look` gives of a call."""

    masses: Tensor  # (set of edges, batch, head, query)
    received: Tensor  # (batch, head, source)
    overlap: Tensor  # (batch, head, head)
    corner: Tensor  # (batch, head, CORNER, CORNER), from the first real position on
    padding: Tensor  # (batch, head): the largest weight that a real row puts on padding


class Look(Reading):
    """All that is not a number of one row alone, from strips or from the whole weight map.

    Rows of padding weigh nothing. The sums over a sequence's edges come in the order of its
    positions, whatever it is batched with.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._kept: tuple[tuple[int, int, int], tuple[Tensor, Tensor]] | None = None

    def of(self, weights: Tensor) -> Looked:
        """Look at whole maps, (batch, head, position, position)."""
        positions = torch.arange(weights.shape[-1], device=weights.device)
        return self.finish(self._part(weights, positions, positions))

    def part(self, strip: Strip) -> Looked:
        """Read one strip."""
        return self._part(strip.weights, strip.queries, strip.sources)

    def merge(self, left: Looked, right: Looked) -> Looked:
        """Put the parts of two strips together."""
        sums = Looked(*(a + b for a, b in zip(left, right, strict=True)))
        return sums._replace(padding=torch.maximum(left.padding, right.padding))

    def finish(self, part: Looked) -> Looked:
        """Turn the products of maps into cosines."""
        return part._replace(overlap=Overlap().finish(part.overlap))

    def _part(self, weights: Tensor, queries: Tensor, sources: Tensor) -> Looked:
        batch = self.batch
        padding = weights.new_zeros(weights.shape[:2])
        if batch.padded:
            weights = torch.where(batch.real[:, None, queries, None], weights, 0)
            padded = torch.where(batch.real[:, None, None, sources], 0, weights)
            padding = padded.sum(-1).amax(-1) if padded.numel() else padding
        received = weights.new_zeros(*weights.shape[:2], batch.sizes[1])
        received[..., sources] = weights.sum(-2)
        # Whole cache lines: a product's last bits depend on where in one its numbers begin.
        maps = torch.nn.functional.pad(weights.flatten(-2), (0, -weights[0, 0].numel() % LINE))
        return Looked(
            self._masses(weights, queries, sources),
            received,
            maps @ maps.mT,
            self._corner(weights, queries, sources),
            padding,
        )

    def _masses(self, weights: Tensor, queries: Tensor, sources: Tensor) -> Tensor:
        batch, position = self.batch.sizes
        heads = weights.shape[1]
        places = self._places(heads, queries, sources)
        sums = weights.new_zeros(len(NAMES) * batch * heads * position)
        sums.index_add_(0, places[1], weights.flatten().index_select(0, places[0]))
        return sums.view(len(NAMES), batch, heads, position)

    def _places(self, heads: int, queries: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
        """Where the edges' weights lie in the strip, and the sums they belong to in the answer."""
        whole = (heads, len(queries), len(sources))
        if self._kept is not None and self._kept[0] == whole:
            return self._kept[1]
        batch, position = self.batch.sizes
        # The column of each source; those that the strip lacks have none.
        column = torch.full((position,), -1, device=sources.device)
        column[sources] = torch.arange(len(sources), device=sources.device)
        head = torch.arange(heads, device=sources.device)
        read, write = [], []
        for number, (sample, row, source) in enumerate(self._edges(queries)):
            there = column[source]
            kept = there >= 0
            sample, row, there = sample[kept], row[kept], there[kept]
            at = (sample[:, None] * heads + head) * len(queries) + row[:, None]
            read.append((at * len(sources) + there[:, None]).flatten())
            to = (number * batch + sample[:, None]) * heads + head
            write.append((to * position + queries[row][:, None]).flatten())
        places = torch.cat(read), torch.cat(write)
        if len(queries) == len(sources) == position:
            # All layers of a model have the same edges.
            self._kept = whole, places
        return places

    def _edges(self, queries: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The sets of edges, as (sample, row of the strip, source)."""
        yield self._band(queries, 0, 0)
        yield self._band(queries, -1, -1)
        ids = self.batch.ids
        sources = torch.arange(ids.shape[1], device=ids.device)
        same = ids[:, queries, None] == ids[:, None]
        same &= sources < queries[:, None]
        sample, row, source = same.nonzero(as_tuple=True)
        yield sample, row, source
        yield sample, row, source + 1
        later = source > 0
        yield sample[later], row[later], source[later] - 1
        sample, row = self._all(queries)
        yield sample, row, self.batch.start[sample]
        yield self._band(queries, -LOCAL, LOCAL)

    def _all(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        sample = torch.arange(self.batch.sizes[0], device=queries.device)
        row = torch.arange(len(queries), device=queries.device)
        return sample.repeat_interleave(len(row)), row.repeat(len(sample))

    def _band(self, queries: Tensor, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
        step = torch.arange(low, high + 1, device=queries.device)
        sample, row = (x.repeat_interleave(len(step)) for x in self._all(queries))
        source = (queries[row].view(-1, len(step)) + step).flatten()
        inside = (source >= 0) & (source < self.batch.sizes[1])
        return sample[inside], row[inside], source[inside]

    def _corner(self, weights: Tensor, queries: Tensor, sources: Tensor) -> Tensor:
        """The corner's weights that the strip holds, 0 elsewhere."""
        corner = weights.new_zeros(*weights.shape[:2], CORNER, CORNER)
        for start in self.batch.start.unique().tolist():
            samples = (self.batch.start == start).nonzero()[:, 0]
            row, column = (
                ((at >= start) & (at < start + CORNER)).nonzero()[:, 0] for at in (queries, sources)
            )
            part = torch.zeros_like(corner[samples])
            held = weights[:, :, row[:, None], column][samples]
            part[:, :, queries[row][:, None] - start, sources[column] - start] = held
            corner[samples] = part
        return corner
