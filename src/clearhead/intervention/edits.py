"""A captured call without some of its samples, heads, edges or weights, and its new context."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead._capture import (
    Call,
    EagerCall,
    FusedCall,
    dense_edges,
    read_call,
    unmasked,
    wide,
)
from clearhead.attention import attend
from clearhead.masks import Mask
from clearhead.readings import LogSumExp, Mass

__all__ = ["EagerEdit", "FusedEdit", "edit", "narrowed", "weight_on", "without"]


def narrowed(call: Call, samples: slice, heads: list[int]) -> Call:
    """Keep some samples and heads of a call."""
    if samples != slice(None):
        call = call.with_samples(samples)
    return call if heads == list(range(call.sizes.head)) else call.with_heads(heads)


class EagerEdit:
    """A handwritten call, the edges that are removed before its softmax, or zeroed after it."""

    def __init__(self, call: EagerCall, removed: Mask | None, zeroed: Mask | None) -> None:
        self.call = call
        self.removed, self.zeroed = (
            None if edges is None else dense_edges(edges, call) for edges in (removed, zeroed)
        )
        self.open = unmasked(call.scores)

    @property
    def rows(self) -> Tensor:
        """Tell which rows have such an edge: bool (batch, head, query, 1)."""
        edges = _either(self.removed, self.zeroed)
        return (self.open & edges).any(-1, keepdim=True)

    def context(self) -> Tensor:
        """Compute the context."""
        call = self.call if self.removed is None else self.without()
        weights = call.weights if call.dropped is None else call.dropped
        if self.zeroed is not None:
            weights = weights.masked_fill(self.zeroed, 0.0)
        return weights.to(call.value.dtype) @ call.value

    def without(self) -> EagerCall:
        """Give the call whose softmax runs over the edges that remain."""
        call, removed = self.call, self.removed
        assert removed is not None
        scores = wide(call.scores).masked_fill(removed, -math.inf)
        # What the model masks with a finite number has no weight beside an edge that remains.
        empty = ~(self.open & ~removed).any(-1, keepdim=True)
        some = bool(empty.any())
        # The gradient of a softmax over nothing is NaN; that of one over zeros, not used, is zero.
        filled = scores.masked_fill(empty, 0.0) if some else scores
        sinks = call.sink_scores
        logits = filled if sinks is None else torch.cat([filled, sinks.to(scores.dtype)], -1)
        weights = logits.softmax(-1)[..., : scores.shape[-1]]
        weights = weights.masked_fill(empty, 0.0) if some else weights
        dropped = call.dropped
        if dropped is not None:
            # What dropout multiplied each weight by: 0, or 1 / (1 - p).
            dropped = weights * (dropped / call.weights).detach().nan_to_num(0.0)
        return replace(
            call, scores=scores, weights=weights.to(call.weights.dtype), lse=None, dropped=dropped
        )


class FusedEdit:
    """A call of a kernel, and the same."""

    def __init__(self, call: FusedCall, removed: Mask | None, zeroed: Mask | None) -> None:
        self.call, self.removed, self.zeroed = call, removed, zeroed

    @property
    def rows(self) -> Tensor:
        """Tell which rows have such an edge: bool (batch or 1, head or 1, query, 1)."""
        edges = _either(self.removed, self.zeroed)
        present = edges if self.call.mask is None else self.call.mask & edges
        batch, heads, query, source = self.call.sizes
        rows = present.counts(query, source, batch=batch, head=heads) > 0
        return rows.reshape((1,) * (3 - rows.ndim) + rows.shape + (1,)).to(self.call.device)

    def context(self) -> Tensor:
        """Compute the context."""
        call = self.call if self.removed is None else self.without()
        if self.zeroed is None:
            return _attend(call)
        context, kept = _attend(_blocked(call, self.zeroed), read=LogSumExp())
        whole = _attend(replace(call, dropout=0.0), read=LogSumExp())[1]
        share = (kept - torch.where(kept == -math.inf, 0.0, whole)).exp()
        return (context * share.unsqueeze(-1)).to(context.dtype)

    def without(self) -> FusedCall:
        """Give the call whose softmax runs over the edges that remain."""
        assert self.removed is not None
        return _blocked(self.call, self.removed)


def _either(removed: Any, zeroed: Any) -> Any:
    if removed is None or zeroed is None:
        return zeroed if removed is None else removed
    return removed | zeroed


def edit(call: Call, removed: Mask | None, zeroed: Mask | None) -> EagerEdit | FusedEdit:
    """Take edges from a call: before its softmax, after it, or both."""
    if isinstance(call, EagerCall):
        return EagerEdit(call, removed, zeroed)
    return FusedEdit(call, removed, zeroed)


def without(call: Call, edges: Mask) -> Call:
    """Give the call as it is read without these edges, which are blocked before the softmax."""
    if isinstance(call, FusedCall):
        return _blocked(call, edges)
    found = EagerEdit(call, edges, None)
    left = found.without()
    assert found.removed is not None
    blocked = ~found.open | found.removed
    return replace(left, scores=left.scores.masked_fill(blocked, -math.inf))


def _blocked(call: FusedCall, edges: Mask) -> FusedCall:
    return replace(call, mask=~edges if call.mask is None else call.mask - edges)


def _attend(call: FusedCall, read: Any = None) -> Any:
    return attend(
        call.query, call.key, call.value, call.mask,
        read=read, scale=call.scale, bias=call.bias, softcap=call.softcap, sinks=call.sinks,
        dropout=call.dropout,
    )  # fmt: skip


def weight_on(call: Call, edges: Mask) -> Tensor:
    """Sum the weight that lies on these edges, (batch, head, query)."""
    with torch.no_grad():
        return read_call(call, (Mass(edges),), None)[0]
