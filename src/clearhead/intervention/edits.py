"""A captured call without some of its samples, heads, edges or weights, and its new context."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead._capture import Call, EagerCall, FusedCall, dense_edges, read_call, unmasked
from clearhead.attention import attend
from clearhead.masks import Mask
from clearhead.readings import LogSumExp, Mass

__all__ = ["context_of", "narrowed", "rows_with", "weight_on", "without"]


def narrowed(call: Call, samples: slice, heads: list[int]) -> Call:
    """Keep some samples and heads of a call."""
    if samples != slice(None):
        call = call.with_samples(samples)
    return call if heads == list(range(call.sizes.head)) else call.with_heads(heads)


def without(call: Call, edges: Mask) -> Call:
    """Give the call without these edges: the softmax runs over the edges that remain."""
    if isinstance(call, EagerCall):
        return _eager_without(call, edges)
    return _fused_without(call, edges)


def _fused_without(call: FusedCall, edges: Mask) -> FusedCall:
    return replace(call, mask=~edges if call.mask is None else call.mask - edges)


def _eager_without(call: EagerCall, edges: Mask) -> EagerCall:
    allowed = unmasked(call.scores) & ~dense_edges(edges, call)
    kind = torch.float64 if call.scores.dtype == torch.float64 else torch.float32
    scores = call.scores.to(kind).masked_fill(~allowed, -math.inf)
    sinks = call.sink_scores
    logits = scores if sinks is None else torch.cat([scores, sinks.to(kind)], -1)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    # The gradient of a softmax over nothing is NaN; that of one over zeros, not used, is zero.
    weights = torch.where(empty, 0.0, logits).softmax(-1)[..., : scores.shape[-1]]
    weights = torch.where(allowed, weights, 0.0)
    dropped = call.dropped
    if dropped is not None:
        # What dropout multiplied each weight by: 0, or 1 / (1 - p).
        dropped = weights * (dropped / call.weights).detach().nan_to_num(0.0)
    lse = torch.where(empty[..., 0], -math.inf, logits.detach().logsumexp(-1))
    weights = weights.to(call.weights.dtype)
    return replace(call, scores=scores, weights=weights, lse=lse, dropped=dropped)


def context_of(call: Call, zeroed: Mask | None = None) -> Tensor:
    """Compute the context, with the weights of some edges zeroed after the softmax."""
    if isinstance(call, EagerCall):
        weights = call.weights if call.dropped is None else call.dropped
        if zeroed is not None:
            weights = weights.masked_fill(dense_edges(zeroed, call), 0.0)
        return weights.to(call.value.dtype) @ call.value
    if zeroed is None:
        return _attend(call)
    context, kept = _attend(_fused_without(call, zeroed), read=LogSumExp())
    whole = _attend(replace(call, dropout=0.0), read=LogSumExp())[1]
    share = (kept - torch.where(kept == -math.inf, 0.0, whole)).exp()
    return (context * share.unsqueeze(-1)).to(context.dtype)


def _attend(call: FusedCall, read: Any = None) -> Any:
    return attend(
        call.query, call.key, call.value, call.mask,
        read=read, scale=call.scale, bias=call.bias, softcap=call.softcap, sinks=call.sinks,
        dropout=call.dropout,
    )  # fmt: skip


def rows_with(call: Call, edges: Mask) -> Tensor:
    """Tell which rows have such an edge: bool (batch or 1, head or 1, query, 1)."""
    if isinstance(call, EagerCall):
        rows = (dense_edges(edges, call) & unmasked(call.scores)).any(-1)
    else:
        present = edges if call.mask is None else call.mask & edges
        batch, heads, query, source = call.sizes
        rows = present.counts(query, source, batch=batch, head=heads) > 0
    rows = rows.to(call.device)
    return rows.reshape((1,) * (3 - rows.ndim) + tuple(rows.shape)).unsqueeze(-1)


def weight_on(call: Call, edges: Mask) -> Tensor:
    """Sum the weight that lies on these edges, (batch, head, query)."""
    with torch.no_grad():
        return read_call(call, (Mass(edges),), None)[0]
