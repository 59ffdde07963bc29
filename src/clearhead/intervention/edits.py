"""What becomes of a captured call: its context without some edges, weights or heads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from clearhead import masks
from clearhead._capture import Call, recompute
from clearhead.attention import attend
from clearhead.masks import Mask
from clearhead.readings import LogSumExp, Mass

__all__ = ["context_of", "dense", "device_of", "left", "narrow", "touched", "weight_on"]


def narrow(call: Call, samples: slice, heads: list[int]) -> Call:
    """Keep some samples and heads of a call."""
    if samples != slice(None):
        call = _samples(call, samples)
    if heads == list(range(call.sizes[1])):
        return call
    part = recompute.choose_heads(call, heads)
    return part.but(rest=_at(call.rest, heads), dropped=_at(call.dropped, heads))


def _at(x: Tensor | None, heads: list[int]) -> Tensor | None:
    return None if x is None else x[:, heads]


def _samples(call: Call, samples: slice) -> Call:
    """Keep some samples of a call."""
    batch = call.sizes[0]

    def part(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 != batch else x[samples]

    mask = call.mask
    if mask is not None and mask.own.batch not in (None, 1):
        mask = masks.dense(dense(mask, call)[samples])
    names = ("query", "key", "value", "bias", "scores", "weights", "lse", "rest", "dropped")
    return call.but(mask=mask, **{name: part(getattr(call, name)) for name in names})


def device_of(call: Call) -> Any:
    """Give the device of a call."""
    return (call.scores if call.query is None else call.query).device  # pyright: ignore


def left(call: Call, edges: Mask) -> Call:
    """Give the call without these edges: softmax shares the weight among the edges that stay."""
    if call.scores is None:
        return call.but(mask=~edges if call.mask is None else call.mask - edges)
    assert call.weights is not None
    open_edges = recompute.allowed(call.scores) & ~dense(edges, call)
    kind = torch.float64 if call.scores.dtype == torch.float64 else torch.float32
    scores = call.scores.to(kind).masked_fill(~open_edges, -math.inf)
    logits = scores if call.rest is None else torch.cat([scores, call.rest.to(kind)], -1)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    # a softmax over nothing has no gradient; one over zeros that is not used has gradient zero
    weights = torch.where(empty, 0.0, logits).softmax(-1)[..., : scores.shape[-1]]
    weights = torch.where(open_edges, weights, 0.0)
    dropped = call.dropped
    if dropped is not None:
        # what dropout left of each weight: 0, or 1 / (1 - p)
        dropped = weights * (dropped / call.weights).detach().nan_to_num(0.0)
    lse = torch.where(empty[..., 0], -math.inf, logits.detach().logsumexp(-1))
    return call.but(scores=scores, weights=weights.to(call.weights.dtype), lse=lse, dropped=dropped)


def context_of(call: Call, zeroed: Mask | None = None) -> Tensor:
    """Mix the values again, without the weights of some edges and without sharing those out."""
    if call.scores is not None:
        assert call.weights is not None
        assert call.value is not None
        weights = call.weights if call.dropped is None else call.dropped
        if zeroed is not None:
            weights = weights.masked_fill(dense(zeroed, call), 0.0)
        return weights.to(call.value.dtype) @ call.value
    if zeroed is None:
        return _attend(call)
    context, kept = _attend(left(call, zeroed), read=LogSumExp())
    whole = _attend(call.but(dropout=0.0), read=LogSumExp())[1]
    share = (kept - torch.where(kept == -math.inf, 0.0, whole)).exp()
    return (context * share.unsqueeze(-1)).to(context.dtype)


def _attend(call: Call, read: Any = None) -> Any:
    assert call.query is not None
    assert call.key is not None
    assert call.value is not None
    return attend(
        call.query, call.key, call.value, call.mask,
        read=read, scale=call.scale, bias=call.bias, softcap=call.softcap, sinks=call.sinks,
        dropout=call.dropout,
    )  # fmt: skip


def dense(edges: Mask, call: Call) -> Tensor:
    """Give the edges as a tensor, (batch or 1, head or 1, query, source)."""
    batch, heads, query, source = call.sizes
    found = edges.dense(query, source, batch=batch, head=heads, device=device_of(call))
    return found.reshape((1,) * (4 - found.ndim) + tuple(found.shape))


def touched(call: Call, edges: Mask) -> Tensor:
    """Tell which rows have such an edge: bool (batch or 1, head or 1, query, 1)."""
    if call.scores is not None:
        rows = (dense(edges, call) & recompute.allowed(call.scores)).any(-1)
    else:
        there = edges if call.mask is None else call.mask & edges
        batch, heads, query, source = call.sizes
        rows = there.counts(query, source, batch=batch, head=heads) > 0
    rows = rows.to(device_of(call))
    return rows.reshape((1,) * (3 - rows.ndim) + tuple(rows.shape)).unsqueeze(-1)


def weight_on(call: Call, edges: Mask) -> Tensor:
    """Sum the weight that lies on these edges, (batch, head, query)."""
    with torch.no_grad():
        return recompute.read(call, (Mass(edges),), None)[0]
