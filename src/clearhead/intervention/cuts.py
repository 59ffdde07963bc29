"""One cut: which heads it acts on, and what it takes from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead import masks
from clearhead._capture import Call
from clearhead._core import Sizes, value_error
from clearhead.intervention.selection import HeadSelection
from clearhead.masks import Mask

__all__ = ["Cut", "EdgeCut", "Offsets", "WeightCut"]


@dataclass(frozen=True)
class Offsets:
    """Where a call stands in the whole sequence: the positions of its first query and source."""

    query: int
    source: int
    generating: bool
    whole: tuple[int, int] | None = None  # queries and sources of it, where the call is a slice

    def edges(self, edges: Mask, call: Call) -> Mask:
        """Give edges in positions of the whole sequence as edges of this call."""
        batch, heads, query, source = call.sizes
        start = self.query == self.source == 0
        if self.whole is None and not self.generating and (start or edges.own.query == query):
            return edges
        rows = torch.arange(self.query, self.query + query, device=call.device)
        columns = torch.arange(self.source, self.source + source, device=call.device)
        last, width = self._whole(edges, call)
        inside = (rows < last)[:, None] & (columns < width)
        sizes = Sizes(batch, heads, last, width)
        tile = edges.tile(rows.clamp(max=last - 1), columns.clamp(max=width - 1), sizes)
        return masks.dense(tile & inside)

    def _whole(self, edges: Mask, call: Call) -> tuple[int, int]:
        """Give how many queries and sources the edges are made for.

        No position after those is cut. Positions that the edges name may lie ahead of the call.
        """
        own, least = edges.own, edges._least()
        if self.whole is not None:
            return own.query or max(self.whole[0], least), own.source or max(self.whole[1], least)
        if call.kind == "cross":
            last, width = self.query + call.sizes.query, call.sizes.source
            return own.query or max(last, least), own.source or width
        last = max(self.query + call.sizes.query, self.source + call.sizes.source, least)
        return own.query or last, own.source or last


class Cut:
    """One thing that is done to some heads, in the whole batch or in some samples of it."""

    reason = "the outputs of the heads are the same as before"

    def __init__(self, selection: HeadSelection, samples: slice = slice(None)) -> None:
        self.selection = selection
        self.samples = samples
        self.moved: dict[tuple[int, int], float] = {}

    @property
    def alike(self) -> bool:
        """Whether it acts on all samples and heads of a layer alike."""
        every = self.selection.heads is None and self.selection.pairs is None
        return every and self.samples == slice(None)

    def context(self, context: Tensor, call: Call, heads: list[int], offsets: Offsets) -> Tensor:
        """Return another context for these heads; edges have been cut before."""
        return context


class EdgeCut(Cut):
    """Removes edges before the softmax."""

    before_softmax = True
    reason = "no weight lies on these edges in the chosen heads, or their values are zero"

    def __init__(self, edges: Mask, selection: HeadSelection, samples: slice = slice(None)) -> None:
        super().__init__(selection, samples)
        self._edges = edges

    @property
    def alike(self) -> bool:
        """Whether it cuts the same edges in all samples and heads of a layer."""
        own = self._edges.own
        return super().alike and own.batch in (None, 1) and own.head in (None, 1)

    def edges(self, call: Call, heads: list[int], offsets: Offsets) -> Mask:
        """Give the edges that are cut in these heads of a call."""
        return offsets.edges(self._of_heads(call, heads), call)

    def _of_heads(self, call: Call, heads: list[int]) -> Mask:
        own, heads = self._edges.own, [call.heads.start + head for head in heads]
        if own.head in (None, 1):
            return self._edges
        if own.head <= max(heads):
            rule = f"are made for {own.head} heads; layer {call.layer} ({call.module}) has more"
            raise value_error("edges", rule, got=f"head {max(heads)}", hint="give as many, or one")
        batch, _, query, source = call.sizes
        query, source = own.query or query, own.source or source
        dense = self._edges.dense(query, source, batch=batch, head=own.head)
        return masks.dense(dense[:, heads])


class WeightCut(EdgeCut):
    """Sets weights to zero after the softmax."""

    before_softmax = False
