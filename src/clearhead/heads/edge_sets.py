"""The sets of edges whose mass the statistics read, as indices into strips of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.heads.batch import Batch

__all__ = ["EDGE_SETS", "LOCAL", "EdgeIndices", "EdgeSets"]

# How far away a source still counts as local.
LOCAL = 8
# The sets of edges, in the order of their sums.
EDGE_SETS = ("self", "previous", "duplicate", "induction", "precursor", "sink", "local")


class EdgeIndices(NamedTuple):
    """Where the weights of all edges lie in a flat strip, and the sums to which they are added."""

    read: Tensor
    write: Tensor


class EdgeSets:
    """The edges of a batch: one sparse sum over all sets, instead of a pass for each set."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._cached: tuple[tuple[int, int, int], EdgeIndices] | None = None

    def masses(self, weights: Tensor, queries: Tensor, sources: Tensor) -> Tensor:
        """Sum a strip of weights over each set: (edge set, batch, head, query)."""
        batch, position = self.batch.sizes
        heads = weights.shape[1]
        at = self._indices(heads, queries, sources)
        sums = weights.new_zeros(len(EDGE_SETS) * batch * heads * position)
        sums.index_add_(0, at.write, weights.flatten().index_select(0, at.read))
        return sums.view(len(EDGE_SETS), batch, heads, position)

    def _indices(self, heads: int, queries: Tensor, sources: Tensor) -> EdgeIndices:
        """Compute the indices; those of a whole map are cached, since all layers share them."""
        shape = (heads, len(queries), len(sources))
        if self._cached is not None and self._cached[0] == shape:
            return self._cached[1]
        indices = self._compute(heads, queries, sources)
        if len(queries) == len(sources) == self.batch.sizes[1]:
            self._cached = shape, indices
        return indices

    def _compute(self, heads: int, queries: Tensor, sources: Tensor) -> EdgeIndices:
        batch, position = self.batch.sizes
        # The column of each source; sources outside the strip have none.
        column = torch.full((position,), -1, device=sources.device)
        column[sources] = torch.arange(len(sources), device=sources.device)
        head = torch.arange(heads, device=sources.device)
        read, write = [], []
        for number, (sample, row, source) in enumerate(self._edges(queries)):
            inside = column[source] >= 0
            sample, row, at = sample[inside], row[inside], column[source[inside]]
            line = (sample[:, None] * heads + head) * len(queries) + row[:, None]
            read.append((line * len(sources) + at[:, None]).flatten())
            target = (number * batch + sample[:, None]) * heads + head
            write.append((target * position + queries[row][:, None]).flatten())
        return EdgeIndices(torch.cat(read), torch.cat(write))

    def _edges(self, queries: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the sets in their order, as (sample, row of the strip, source)."""
        yield self._band(queries, 0, 0)
        yield self._band(queries, -1, -1)
        yield from self._repeats(queries)
        sample, row = self._rows(queries)
        yield sample, row, self.batch.start[sample]
        yield self._band(queries, -LOCAL, LOCAL)

    def _repeats(self, queries: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield earlier occurrences of the query's token, the sources after, and before them."""
        ids = self.batch.ids
        sources = torch.arange(ids.shape[1], device=ids.device)
        same = ids[:, queries, None] == ids[:, None]
        same &= sources < queries[:, None]
        sample, row, source = same.nonzero(as_tuple=True)
        yield sample, row, source
        yield sample, row, source + 1
        later = source > 0
        yield sample[later], row[later], source[later] - 1

    def _rows(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        sample = torch.arange(self.batch.sizes[0], device=queries.device)
        row = torch.arange(len(queries), device=queries.device)
        return sample.repeat_interleave(len(row)), row.repeat(len(sample))

    def _band(self, queries: Tensor, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
        step = torch.arange(low, high + 1, device=queries.device)
        sample, row = (x.repeat_interleave(len(step)) for x in self._rows(queries))
        source = (queries[row].view(-1, len(step)) + step).flatten()
        inside = (source >= 0) & (source < self.batch.sizes[1])
        return sample[inside], row[inside], source[inside]
