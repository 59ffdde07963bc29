"""What is read of an attention call: for each head the largest score, and sums over its queries."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from clearhead import masks, readings
from clearhead._capture import Call, EagerCall, FusedCall, read_call, unmasked
from clearhead.attention import Problem
from clearhead.monitoring.rows import Counted, KnownRows

__all__ = ["READ", "STATISTICS", "of_call"]

# The last axis of the history: a maximum, means over the queries, and how many these were.
STATISTICS = (
    *("max_logit", "entropy", "entropy_normalized", "sink", "confidence", "self"),
    *("output_norm", "rows"),
)
# In one pass of the kernel; all else follows from them.
READ = (readings.MaxScore(), readings.LogSumExp(), readings.Entropy())
# Products of query and key that are made at a time.
_PRODUCTS = 1 << 22


def of_call(
    call: Call, context: Tensor, sinks: int, known: KnownRows, made: list[Any] | None
) -> tuple[Tensor, Tensor]:
    """Give the largest score of each head, (head,), and its sums, (head, statistic but the first).

    `made` are the values of `READ` where they are known already.
    """
    if isinstance(call, EagerCall):
        most, each, real = _handwritten(call, sinks)
    else:
        most, each, real = _fused(call, sinks, known.of(call), made)
    each.append(torch.linalg.vector_norm(context, dim=-1, dtype=most.dtype))
    each.append(torch.ones_like(most))
    every = torch.stack(each, -1)
    if real is not None:
        real = real.expand(most.shape)
        most = most.masked_fill(~real, -math.inf)
        every = torch.where(real.unsqueeze(-1), every, 0)
    wide = every.sum((0, 2), dtype=_wide(most.device))
    return most.transpose(0, 1).flatten(1).amax(-1).to(wide.dtype), wide


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _fused(
    call: FusedCall, sinks: int, rows: Counted, made: list[Any] | None
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    most, lse, entropy = read_call(call, READ, None) if made is None else made
    problem = call.problem
    at = torch.arange(call.sizes.query, device=call.device)
    first = torch.arange(min(sinks, call.sizes.source), device=call.device)
    sink = _weights(_first_scores(call, problem, first), lse.unsqueeze(-1), _first(call, at, first))
    own = _weights(_own_scores(call, problem), lse, rows.own)
    if call.kind == "cross":
        own = torch.full_like(lse, math.nan)  # the positions are those of two sequences
    confidence = _weights(most, lse, most != -math.inf)
    sizes = torch.where(rows.counts > 1, rows.counts, 2).to(entropy.dtype).log()
    normalized = torch.where(rows.counts > 1, entropy / sizes, 0)
    return most, [entropy, normalized, sink.sum(-1), confidence, own], rows.real


def _weights(scores: Tensor, lse: Tensor, allowed: Tensor) -> Tensor:
    """The weights of some edges; 0 where they are blocked. A NaN shows."""
    blocked = ~allowed & ~scores.isnan() if scores is lse else ~allowed
    return torch.where(blocked, 0, (scores - lse).exp())


def _first_scores(call: FusedCall, problem: Problem, first: Tensor) -> Tensor:
    """The scores of the first sources, (batch, head, query, source)."""
    key = call.key[:, :, : len(first)].to(problem.dtype)
    query = call.query.unflatten(1, (call.source_heads, problem.group)).to(problem.dtype)
    scores = torch.einsum("bsgqd,bskd->bsgqk", query, key).flatten(1, 2)
    bias = None if call.bias is None else call.bias[..., : len(first)]
    return _final(call, scores, bias)


def _first(call: FusedCall, at: Tensor, first: Tensor) -> Tensor:
    if call.mask is None:
        return torch.ones((), dtype=torch.bool, device=at.device)
    return call.mask.tile(at, first, call.sizes)


def _own_scores(call: FusedCall, problem: Problem) -> Tensor:
    """The score of each query with its own position, (batch, head, query)."""
    batch, heads, query, source = call.sizes
    offset = source - query if call.spread is None else call.spread.first
    start = max(0, -offset)  # the first query that has a position among the sources
    key = call.key[:, :, start + offset : offset + query]
    step = max(1, _PRODUCTS // max(heads * query * call.query.shape[-1], 1))
    scores = call.query.new_zeros(batch, heads, query, dtype=problem.dtype)
    for some in (slice(b, b + step) for b in range(0, batch, step)):
        left = call.query[some, :, start:].unflatten(1, (-1, problem.group)).to(problem.dtype)
        product = (left * key[some].unsqueeze(2).to(problem.dtype)).sum(-1)
        scores[some, :, start:] = product.flatten(1, 2)
    bias = call.bias
    if bias is not None:
        at = torch.arange(query, device=call.device)
        bias = bias.expand(*bias.shape[:2], query, source)[..., at, (at + offset).clamp(min=0)]
    return _final(call, scores, bias)


def _final(call: FusedCall, scores: Tensor, bias: Tensor | None) -> Tensor:
    """Apply scale, softcap and bias to products of query and key."""
    scores = scores * call.score_scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores if bias is None else scores + bias.to(scores.dtype)


def _handwritten(call: EagerCall, sinks: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Of a call whose weights the model made itself."""
    query, source = call.sizes[2:]
    read = (readings.MaxScore(), readings.Entropy(), readings.Entropy(normalized=True))
    read += (readings.Mass(masks.first(sinks)), readings.Mass(masks.diagonal(0)))
    most, entropy, normalized, sink, own = read_call(call, read, None)
    if call.kind == "cross":
        own = torch.full_like(own, math.nan)
    confidence = call.weights.amax(-1).to(most.dtype)
    edges = unmasked(call.scores)
    real = edges.any(-1)
    if call.kind == "self" and query == source:
        real = real & edges.any(-2).any(1, keepdim=True)
    return most, [entropy, normalized, sink, confidence, own], real
