"""What is read of an attention call: for each head the largest score, and sums over its queries.

A call of a kernel is read in two steps: a few numbers a query at once, and the sums over the
queries for all layers whose calls are alike together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead import masks, readings
from clearhead._capture import EagerCall, FusedCall, read_call, unmasked, wide
from clearhead.monitoring.rows import Counted, widest

__all__ = ["READ", "STATISTICS", "QueryNumbers", "of_calls", "of_handwritten", "of_queries"]

# The last axis of the history: a maximum, means over the queries, and how many these were.
STATISTICS = (
    *("max_logit", "entropy", "entropy_normalized", "sink", "confidence", "self"),
    *("output_norm", "rows"),
)
# In one pass of the kernel; all else follows from them.
READ = (readings.MaxScore(), readings.LogSumExp(), readings.Entropy())
# Products of query and key that are made at a time.
_PRODUCTS = 1 << 18


class QueryNumbers(NamedTuple):
    """The numbers of the queries of one call, (batch, head, query), or of several, stacked."""

    most: Tensor  # the largest score
    lse: Tensor
    entropy: Tensor
    norm: Tensor  # of the context
    own: Tensor  # the score with the source at the query's own position, over `scale`
    first: Tensor  # those with the first sources, on one more axis
    scale: float


def of_queries(
    call: FusedCall, context: Tensor, rows: Counted, made: list[Tensor] | None
) -> QueryNumbers:
    """Read a call of a kernel; `made` are the values of `READ` where they are known already."""
    most, lse, entropy = read_call(call, READ, None) if made is None else made
    norm = torch.linalg.vector_norm(context, dim=-1, dtype=most.dtype)
    own, first = _own_products(call), _first_products(call, rows.first.shape[-1])
    if call.bias is None and call.softcap is None:
        return QueryNumbers(most, lse, entropy, norm, own, first, call.score_scale)
    own, first = _final(call, own, _own_bias(call)), _final(call, first, call.bias)
    return QueryNumbers(most, lse, entropy, norm, own, first, 1.0)


def of_calls(found: list[QueryNumbers], rows: Counted, kind: str) -> tuple[Tensor, Tensor]:
    """Give the largest scores of calls that are alike, (call, head), and their sums."""
    each = torch.stack([x for one in found for x in one[:5]]).unflatten(0, (len(found), 5))
    most, lse, entropy, norm, own = each.unbind(1)
    first, scale = torch.stack([one.first for one in found]), found[0].scale
    sink = (first.mul_(scale) - lse.unsqueeze(-1)).exp_()
    sink = sink.masked_fill_(~rows.first, 0).sum(-1)
    if kind == "cross":
        own = torch.full_like(lse, math.nan)  # the positions are those of two sequences
    else:
        own = (own * scale - lse).exp_().masked_fill_(~rows.own, 0)
    confidence = (most - lse).exp_().masked_fill_(most == -math.inf, 0)
    normalized = (entropy / rows.largest.to(entropy.dtype)).masked_fill_(rows.counts <= 1, 0)
    return _summed(most, [entropy, normalized, sink, confidence, own, norm], rows.real)


def of_handwritten(call: EagerCall, context: Tensor, sinks: int) -> tuple[Tensor, Tensor]:
    """Give the same of one call whose weights the model made itself."""
    query, source = call.sizes[2:]
    read = (readings.MaxScore(), readings.Entropy(), readings.Entropy(normalized=True))
    read += (readings.Mass(masks.first(sinks)), readings.Mass(masks.diagonal(0)))
    most, entropy, normalized, sink, own = read_call(call, read, None)
    if call.kind == "cross":
        own = torch.full_like(own, math.nan)
    confidence = call.weights.amax(-1).to(most.dtype)
    norm = torch.linalg.vector_norm(context, dim=-1, dtype=most.dtype)
    edges = unmasked(call.scores)
    real = edges.any(-1)
    if call.kind == "self" and query == source:
        real = real & edges.any(-2).any(1, keepdim=True)
    each = [x[None] for x in (entropy, normalized, sink, confidence, own, norm)]
    return _summed(most[None], each, real)


def _summed(most: Tensor, each: list[Tensor], real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum over the queries that count: (call, head), and (call, head, statistic but the first)."""
    every, wide = torch.stack(each), widest(most.device)
    if real is None:
        counted = torch.full(most.shape[::2], math.prod(most.shape[1::2]), dtype=wide)
        counted = counted.to(most.device)
    else:
        real = real.expand(most.shape)
        most = most.masked_fill(~real, -math.inf)
        every = torch.where(real, every, 0)
        counted = real.sum((1, 3)).to(wide)
    sums = every.sum((2, 4), dtype=wide)
    return most.amax((1, 3)).to(wide), torch.cat([sums, counted[None]]).movedim(0, -1)


def _first_products(call: FusedCall, first: int) -> Tensor:
    """The products with the first sources, (batch, head, query, source)."""
    key = wide(call.key[:, :, :first])
    group = call.sizes.head // call.source_heads
    if group > 1:
        key = key.repeat_interleave(group, 1)
    return wide(call.query) @ key.mT


def _own_products(call: FusedCall) -> Tensor:
    """The product of each query with its own position, (batch, head, query)."""
    batch, heads, query, source = call.sizes
    offset = source - query if call.spread is None else call.spread.first
    left, right, start = call.query, call.key, max(0, -offset)
    if query != source:  # the first `start` queries have no position among the sources
        left, right = left[:, :, start:], right[:, :, start + offset : offset + query]
    step = max(1, _PRODUCTS // max(batch * heads * left.shape[-1], 1))
    if left.shape[2] <= step:
        found = _products(left, right)
    else:
        parts = zip(left.split(step, 2), right.split(step, 2), strict=True)
        found = torch.cat([_products(*part) for part in parts], -1)
    return torch.nn.functional.pad(found, (start, 0)) if start else found


def _products(query: Tensor, key: Tensor) -> Tensor:
    """The products of queries with keys that stand at the same position."""
    query, key = wide(query), wide(key)
    if query.shape[1] == key.shape[1]:
        return (query * key).sum(-1)
    query = query.unflatten(1, (key.shape[1], -1))
    return (query * key.unsqueeze(2)).sum(-1).flatten(1, 2)


def _own_bias(call: FusedCall) -> Tensor | None:
    """The bias of each query's own position, (batch, head, query)."""
    if call.bias is None:
        return None
    query, source = call.sizes[2:]
    at = torch.arange(query, device=call.device)
    bias = call.bias.expand(*call.bias.shape[:2], query, source)
    return bias[..., at, (at + source - query).clamp(min=0)]


def _final(call: FusedCall, scores: Tensor, bias: Tensor | None) -> Tensor:
    """Apply scale, softcap and bias to products of query and key."""
    scores = scores * call.score_scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if bias is None:
        return scores
    return scores + bias[..., : scores.shape[-1]].to(scores.dtype)
