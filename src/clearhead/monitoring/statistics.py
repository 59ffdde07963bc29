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
from clearhead._capture import EagerCall, FusedCall, read_call, unmasked
from clearhead.attention import Problem
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
    own: Tensor  # the score with the source at the query's own position
    first: Tensor  # those with the first sources, on one more axis
    norm: Tensor  # of the context


def of_queries(
    call: FusedCall, context: Tensor, rows: Counted, made: list[Tensor] | None
) -> QueryNumbers:
    """Read a call of a kernel; `made` are the values of `READ` where they are known already."""
    most, lse, entropy = read_call(call, READ, None) if made is None else made
    problem = call.problem
    own, first = _own_scores(call, problem), _first_scores(call, problem, rows.first.shape[-1])
    norm = torch.linalg.vector_norm(context, dim=-1, dtype=most.dtype)
    return QueryNumbers(most, lse, entropy, own, first, norm)


def of_calls(found: list[QueryNumbers], rows: Counted, kind: str) -> tuple[Tensor, Tensor]:
    """Give the largest scores of calls that are alike, (call, head), and their sums."""
    most, lse, entropy, own, first, norm = (torch.stack(each) for each in zip(*found, strict=True))
    sink = torch.where(rows.first, (first - lse.unsqueeze(-1)).exp(), 0).sum(-1)
    if kind == "cross":
        own = torch.full_like(lse, math.nan)  # the positions are those of two sequences
    else:
        own = torch.where(rows.own, (own - lse).exp(), 0)
    confidence = torch.where(most != -math.inf, (most - lse).exp(), 0)
    normalized = torch.where(rows.counts > 1, entropy / rows.largest.to(entropy.dtype), 0)
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


def _first_scores(call: FusedCall, problem: Problem, first: int) -> Tensor:
    """The scores of the first sources, (batch, head, query, source)."""
    key = call.key[:, :, :first].to(problem.dtype)
    if problem.group > 1:
        key = key.repeat_interleave(problem.group, 1)
    scores = call.query.to(problem.dtype) @ key.mT
    return _final(call, scores, None if call.bias is None else call.bias[..., :first])


def _own_scores(call: FusedCall, problem: Problem) -> Tensor:
    """The score of each query with its own position, (batch, head, query)."""
    _, heads, query, source = call.sizes
    offset = source - query
    start = max(0, -offset)  # the first query that has a position among the sources
    left, right = call.query[:, :, start:], call.key[:, :, start + offset : source]
    step = max(1, _PRODUCTS // max(call.sizes.batch * heads * call.query.shape[-1], 1))
    parts = zip(left.split(step, 2), right.split(step, 2), strict=True)
    found = [_products(*part, problem) for part in parts]
    scores = found[0] if len(found) == 1 else torch.cat(found, -1)
    if start:
        scores = torch.nn.functional.pad(scores, (start, 0))
    bias = call.bias
    if bias is not None:
        at = torch.arange(query, device=call.device)
        bias = bias.expand(*bias.shape[:2], query, source)[..., at, (at + offset).clamp(min=0)]
    return _final(call, scores, bias)


def _products(query: Tensor, key: Tensor, problem: Problem) -> Tensor:
    """The products of queries with keys that stand at the same position."""
    query, key = query.to(problem.dtype), key.to(problem.dtype)
    if problem.group == 1:
        return (query * key).sum(-1)
    query = query.unflatten(1, (-1, problem.group))
    return (query * key.unsqueeze(2)).sum(-1).flatten(1, 2)


def _final(call: FusedCall, scores: Tensor, bias: Tensor | None) -> Tensor:
    """Apply scale, softcap and bias to products of query and key."""
    scores = scores * call.score_scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores if bias is None else scores + bias.to(scores.dtype)
