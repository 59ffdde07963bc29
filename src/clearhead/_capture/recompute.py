"""Readings of a captured call: of all of its rows, or of chosen heads and rows only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead import masks
from clearhead._capture.call import Call
from clearhead.attention import checks, impl
from clearhead.masks import Mask
from clearhead.readings import Reading, Scores, Strip, Weights

__all__ = [
    "allowed",
    "choose_heads",
    "difference",
    "mask_of",
    "read",
    "shared",
    "strip",
    "tolerance",
]

# Numbers in one strip of scores: 4 MiB of float32.
_STRIP = 1 << 20
# A matrix of so many numbers is large.
_LARGE = 1 << 17


def read(call: Call, wanted: Sequence[Reading], queries: Sequence[int] | None) -> list[Any]:
    """Give one value for each reading; with `queries`, of those rows of the weight map only."""
    if queries is None and call.scores is None and call.query is not None:
        problem, asked = call.problem, tuple(wanted)
        checks.readings(asked, problem)
        chosen = impl.choose(problem, asked, None)
        # the tiled one can leave the context out; the native one is faster with it
        alone = getattr(chosen, "readings_only", lambda *given: chosen.attend(*given)[1])
        return alone(problem, asked)
    sizes = call.sizes
    for reading in wanted:
        reading.check(sizes)
    total = call.sizes[2]
    rows = list(range(total)) if queries is None else sorted({row % total for row in queries})
    parts: list[Any] = [None] * len(wanted)
    for piece in _strips(call, rows):
        for at, reading in enumerate(wanted):
            part = reading.part(piece)
            parts[at] = part if parts[at] is None else reading.merge(parts[at], part)
    return [_finish(*pair, queries) for pair in zip(wanted, parts, strict=True)]


def _finish(reading: Reading, part: Any, queries: Sequence[int] | None) -> Any:
    if queries is not None and isinstance(reading, (Weights, Scores)):
        # of chosen rows only: the rest of the map is never made
        return torch.cat([piece for _, _, piece in part.pieces], -2)
    return reading.finish(part)


def _strips(call: Call, rows: list[int]) -> Iterator[Strip]:
    batch, heads, _, source = call.sizes
    step = max(1, _STRIP // max(1, batch * heads * source))
    for start in range(0, max(len(rows), 1), step):
        yield strip(call, rows[start : start + step])


def strip(
    call: Call,
    rows: Sequence[int],
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Strip:
    """Weigh some rows of the call, ascending, over all of its sources."""
    if call.scores is not None:
        return _given(call, rows)
    assert call.query is not None
    assert call.key is not None
    device, source = call.query.device, call.key.shape[2]
    at = torch.tensor(list(rows), dtype=torch.int64, device=device)
    columns = torch.arange(source, device=device)
    scores = _scores(call, at, columns, product)
    logits = scores
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype).reshape(-1, 1, 1)
        logits = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    lse = torch.logsumexp(logits, -1)
    return Strip.of(scores, lse=lse, queries=at, query=call.sizes[2], source=source)


def _scores(call: Call, at: Tensor, columns: Tensor, product: Any) -> Tensor:
    assert call.query is not None
    assert call.key is not None
    problem = call.problem
    batch, heads, _, width = call.query.shape
    shared = call.key.shape[1]
    query = call.query[:, :, at].to(problem.dtype).reshape(batch, shared, -1, width)
    scores = product(query, call.key.to(problem.dtype).mT)
    scores = scores.reshape(batch, heads, len(at), len(columns)) * problem.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        rows = call.bias if call.bias.shape[-2] == 1 else call.bias[..., at, :]
        scores = scores + rows.to(problem.dtype)
    if call.mask is not None:
        edges = call.mask.tile(at, columns, call.sizes)
        scores = scores.masked_fill(~edges, -math.inf)
    return scores


def _given(call: Call, rows: Sequence[int]) -> Strip:
    """Take rows of a weight map that the model made itself."""
    assert call.scores is not None
    assert call.weights is not None
    assert call.lse is not None
    at = torch.tensor(list(rows), dtype=torch.int64, device=call.scores.device)
    raw = call.scores[:, :, at]
    scores = raw.double() if raw.dtype == torch.float64 else raw.float()
    weights = call.weights[:, :, at].to(scores.dtype)
    scores = scores.masked_fill(~allowed(raw), -math.inf)
    columns = torch.arange(scores.shape[-1], device=scores.device)
    lse = call.lse[:, :, at]
    return Strip(scores, weights, lse, at, columns, call.sizes[2], call.sizes[3])


def allowed(scores: Tensor) -> Tensor:
    """Tell which scores a model has masked: -inf, or about the lowest finite number of its dtype.

    In a row where all are that low the finite constant masks nothing: the softmax is uniform.
    """
    low = torch.finfo(scores.dtype).min / 2
    open_edges = scores > low
    swamped = ~open_edges.any(-1, keepdim=True) & (scores > -math.inf).all(-1, keepdim=True)
    return open_edges | swamped | scores.isnan()


def choose_heads(call: Call, heads: Sequence[int]) -> Call:
    """Keep some (query) heads of a call, in the order given."""
    at = list(heads)
    if call.scores is not None:
        assert call.weights is not None
        assert call.lse is not None
        value = None if call.value is None else call.value[:, at]
        return call.but(
            scores=call.scores[:, at],
            weights=call.weights[:, at],
            lse=call.lse[:, at],
            value=value,
        )
    assert call.query is not None
    assert call.key is not None
    assert call.value is not None
    group = call.query.shape[1] // call.key.shape[1]
    shared = [head // group for head in at]
    return call.but(
        query=call.query[:, at],
        key=call.key[:, shared],
        value=call.value[:, shared],
        mask=_heads_of(call, at),
        bias=call.bias if call.bias is None or call.bias.shape[1] == 1 else call.bias[:, at],
        sinks=None if call.sinks is None else call.sinks[at],
    )


def _heads_of(call: Call, at: list[int]) -> Any:
    if call.mask is None:
        return None
    if call.mask.own.head in (None, 1):
        return call.mask
    sizes, device = call.sizes, call.query.device if call.query is not None else None
    dense = call.mask.dense(
        sizes.query, sizes.source, batch=sizes.batch, head=sizes.head, device=device
    )
    return masks.dense(dense[:, at])


def difference(call: Call, context: Tensor, rows: Sequence[int]) -> float | None:
    """Recompute sampled rows and give the largest difference from the model's own context."""
    if call.dropout or call.value is None or not rows or not context.numel():
        return None
    piece = strip(call, rows, few_rows)
    batch, heads, _, source = piece.weights.shape
    value = call.value.to(piece.weights.dtype)
    shared = value.shape[1]
    weights = piece.weights.reshape(batch, shared, -1, source)
    again = few_rows(weights, value).reshape(batch, heads, len(rows), -1)
    own = context[:, :, list(rows)].to(again.dtype)
    return float((again - own).abs().max())


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


def tolerance(context: Tensor) -> float:
    """How large a `difference` rounding alone can make."""
    return max(1e-4, 8 * torch.finfo(context.dtype).eps) * float(context.abs().max())


def mask_of(call: Call, known: list[tuple[Tensor, Mask]]) -> Mask | None:
    """Give the edges that the call allows; None where it allows all."""
    if call.scores is None:
        return call.mask
    return shared(allowed(call.scores), known)


def shared(edges: Tensor, known: list[tuple[Tensor, Mask]]) -> Mask | None:
    """Make a mask of (batch, head, query, source) edges: a named one, or one shared by layers."""
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
