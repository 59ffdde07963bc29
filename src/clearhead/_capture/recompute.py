"""Readings of a captured call, and the check of its context, by computing rows of it again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead import masks
from clearhead._capture.call import Call, EagerCall, FusedCall, unmasked, wide
from clearhead._core import value_error
from clearhead.attention import check_readings, choose
from clearhead.masks import Mask
from clearhead.readings import Reading, Strip

__all__ = [
    "call_mask",
    "call_strip",
    "context_difference",
    "few_rows",
    "read_call",
    "rounding_bound",
    "shared_mask",
    "softmax_difference",
]

# Numbers in one strip of scores: 4 MiB of float32.
_STRIP = 1 << 20
# A matrix of so many numbers is large.
_LARGE = 1 << 17
# So many rows are few.
_FEW = 4
# How far weights may be from a softmax, in any dtype, before an epsilon or a factor explains it.
_WEIGHT_ROUNDING = 1e-6


def read_call(call: Call, wanted: Sequence[Reading], queries: Sequence[int] | None) -> list[Any]:
    """Give one value for each reading; with `queries`, of those rows of the weight map only."""
    if isinstance(call, FusedCall) and call.spread is not None:
        if queries is not None:
            hint = "leave queries out, and read readings.Rows(queries)"
            rule = "are not chosen where ranks have different ones"
            raise value_error("queries", rule, got=list(queries), hint=hint)
        return call.spread.read(call, wanted)
    if queries is None and isinstance(call, FusedCall):
        problem, read = call.problem, tuple(wanted)
        check_readings(read, problem)
        return choose(problem, read).readings_only(problem, read)
    for reading in wanted:
        reading.check(call.sizes)
    total = call.sizes.query
    rows = list(range(total)) if queries is None else sorted({row % total for row in queries})
    parts: list[Any] = [None] * len(wanted)
    for strip in _strips(call, rows):
        for at, reading in enumerate(wanted):
            part = reading.part(strip)
            parts[at] = part if parts[at] is None else reading.merge(parts[at], part)
    return [_finish(*pair, queries) for pair in zip(wanted, parts, strict=True)]


def _finish(reading: Reading, part: Any, queries: Sequence[int] | None) -> Any:
    if queries is not None and reading.whole_map:
        # Of the chosen rows only: the other rows of the map are never made.
        return torch.cat([piece for _, _, piece in part.pieces], -2)
    return reading.finish(part)


def _strips(call: Call, rows: list[int]) -> Iterator[Strip]:
    batch, heads, _, source = call.sizes
    step = max(1, _STRIP // max(1, batch * heads * source))
    for start in range(0, max(len(rows), 1), step):
        yield call_strip(call, rows[start : start + step])


def call_strip(
    call: Call,
    rows: Sequence[int],
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Strip:
    """Give some rows of the weight map, ascending, over all sources; `product` makes the scores."""
    at = torch.tensor(list(rows), dtype=torch.int64, device=call.device)
    return _eager_strip(call, at) if isinstance(call, EagerCall) else _strip(call, at, product)


def _strip(call: FusedCall, at: Tensor, product: Any) -> Strip:
    scores = _scores(call, at, product)
    logits = scores
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype).reshape(-1, 1, 1)
        logits = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    lse = torch.logsumexp(logits, -1)
    sizes = call.sizes
    return Strip.of(scores, lse=lse, queries=at, query=sizes.query, source=sizes.source)


def _scores(call: FusedCall, at: Tensor, product: Any) -> Tensor:
    problem, sizes, width = call.problem, call.sizes, call.query.shape[-1]
    query = call.query[:, :, at].to(problem.dtype)
    query = query.reshape(sizes.batch, call.source_heads, -1, width)
    scores = product(query, call.key.to(problem.dtype).mT)
    scores = scores.reshape(sizes.batch, sizes.head, len(at), sizes.source) * problem.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        rows = call.bias if call.bias.shape[-2] == 1 else call.bias[..., at, :]
        scores = scores + rows.to(problem.dtype)
    if call.mask is not None:
        edges = call.mask.tile(at, torch.arange(sizes.source, device=call.device), sizes)
        scores = scores.masked_fill(~edges, -math.inf)
    return scores


def _eager_strip(call: EagerCall, at: Tensor) -> Strip:
    """Take rows of the weight map that the model itself made."""
    raw = call.scores[:, :, at]
    scores = wide(raw)
    weights = call.weights[:, :, at].to(scores.dtype)
    scores = scores.masked_fill(~unmasked(raw), -math.inf)
    columns = torch.arange(scores.shape[-1], device=scores.device)
    lse = call.lse_of(at)
    return Strip(scores, weights, lse, at, columns, call.sizes.query, call.sizes.source)


def context_difference(call: Call, context: Tensor, rows: Sequence[int]) -> float | None:
    """Compute some rows again, and give the largest difference from the model's own context.

    None where dropout acts, or there is nothing to compare.
    """
    if call.dropout or not rows or not context.numel():
        return None
    product = few_rows if len(rows) <= _FEW else torch.matmul
    weights = _rows_of_weights(call, rows, product)
    batch, heads, _, source = weights.shape
    value = call.value.to(weights.dtype)
    shared = value.shape[1]
    weights = weights.reshape(batch, shared, -1, source)
    again = product(weights, value).reshape(batch, heads, len(rows), -1)
    least, most = torch.aminmax(again.sub_(context[:, :, _at(rows)]))
    return max(-float(least), float(most))


def softmax_difference(call: EagerCall, rows: Sequence[int]) -> float | None:
    """Give how far weights of some rows are from the softmax of the scores seen.

    None where rounding explains it. A row without any source has no weights to compare.
    """
    batch, heads, _, source = call.sizes
    step = max(1, _STRIP // max(1, batch * heads * source))
    pieces = (_softmax_error(call, rows[at : at + step]) for at in range(0, len(rows), step))
    return max((size for size in pieces if size), default=None)


def _softmax_error(call: EagerCall, rows: Sequence[int]) -> float:
    at = _at(rows)
    scores, weights = wide(call.scores[:, :, at]), call.weights[:, :, at]
    if call.sink_scores is not None:
        scores = torch.cat([scores, wide(call.sink_scores[:, :, at])], -1)
    soft = scores.softmax(-1)[..., : weights.shape[-1]]
    eps = max(torch.finfo(x.dtype).eps for x in (call.scores, call.weights))
    off = soft - weights
    least, most = torch.aminmax(off) if off.numel() else (0.0, 0.0)
    if max(-least, most) <= _WEIGHT_ROUNDING + 0.5 * eps:
        return 0.0
    bound = _WEIGHT_ROUNDING + eps * (0.5 + (4 + call.lse_of(at).unsqueeze(-1).abs()) * soft)
    off = off.abs()
    # A row without sources is NaN in a softmax, whatever a model makes of it.
    return float(torch.where(off > bound, off, 0.0).nan_to_num(0.0).max())


def _at(rows: Sequence[int]) -> Any:
    """Give ascending rows as an index: a slice, which copies nothing, where none is left out."""
    first, last = rows[0], rows[-1]
    return slice(first, last + 1) if last - first + 1 == len(rows) else list(rows)


def _rows_of_weights(call: Call, rows: Sequence[int], product: Any) -> Tensor:
    """Give the weights of some rows, which the model made itself or are computed here."""
    if isinstance(call, FusedCall):
        return call_strip(call, rows, product).weights
    return wide(call.weights[:, :, _at(rows)])


def few_rows(left: Tensor, right: Tensor) -> Tensor:
    """Multiply a few rows, (batch, head, row, inner), by (batch, head, inner, column).

    Not by BLAS where the matrix is large: it keeps the buffers of its first large call, and among
    the tensors of a model, which come and go, those pin the heap at the size that it has by then.
    """
    if right.shape[-1] * right.shape[-2] < _LARGE or not right.is_cpu:
        return left @ right
    pairs = [pair for both in zip(left, right, strict=True) for pair in zip(*both, strict=True)]
    sums = [torch.stack([(row[:, None] * matrix).sum(0) for row in rows]) for rows, matrix in pairs]
    return torch.stack(sums).unflatten(0, left.shape[:2])


def rounding_bound(context: Tensor) -> float:
    """How large a `context_difference` rounding alone can make."""
    return max(1e-4, 8 * torch.finfo(context.dtype).eps) * float(context.abs().max())


def call_mask(call: Call, known: list[tuple[Tensor, Mask]]) -> Mask | None:
    """Give the edges that the call allows; None where it allows all."""
    if isinstance(call, FusedCall):
        return call.mask
    return shared_mask(unmasked(call.scores), known)


def shared_mask(edges: Tensor, known: list[tuple[Tensor, Mask]]) -> Mask | None:
    """Make a mask of (batch, head, query, source) edges: causal, or one that layers share."""
    if bool(edges.all()):
        return None
    for axis in (0, 1):
        one = edges.narrow(axis, 0, 1)
        edges = one if bool((edges == one).all()) else edges
    if edges.shape[:2] == (1, 1):
        query, source = edges.shape[2:]
        if torch.equal(edges[0, 0], masks.causal().dense(query, source, device=edges.device)):
            return masks.causal()
    for tensor, mask in known:
        if tensor.shape == edges.shape and torch.equal(tensor, edges):
            return mask
    edges = edges.contiguous()
    known.append((edges, masks.dense(edges)))
    return known[-1][1]
