"""Strips of the score map: which rows and sources belong together, and the equation on one."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from clearhead.attention.impl import dropout
from clearhead.attention.problem import Problem
from clearhead.readings import Strip

__all__ = ["Piece", "dot", "mix", "plan", "take", "weigh"]

INF = float("inf")
# The width of the tiles that a mask without intervals is queried in.
WIDTH = 128
# Beyond this many sources a mask is asked for the sources of a strip first, which are few where
# they are at most one in FEW.
LISTED, FEW = 1024, 4


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows, and all sources that any of them may read."""

    rows: slice
    columns: slice | Tensor  # a range of sources, or their positions, ascending
    open: slice  # counted within columns: what every row may read, where no mask is needed

    @property
    def width(self) -> int:
        """How many sources there are."""
        if isinstance(self.columns, Tensor):
            return len(self.columns)
        return self.columns.stop - self.columns.start

    @property
    def shut(self) -> list[slice]:
        """The columns, counted within the piece, that some row may not read."""
        sides = [slice(0, self.open.start), slice(self.open.stop, self.width)]
        return [side for side in sides if side.start < side.stop]

    @property
    def shut_width(self) -> int:
        """How many columns some row may not read."""
        return sum(side.stop - side.start for side in self.shut)

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows and columns as tensors of positions."""
        rows = torch.arange(self.rows.start, self.rows.stop, device=device)
        if isinstance(self.columns, Tensor):
            return rows, self.columns
        return rows, torch.arange(self.columns.start, self.columns.stop, device=device)


def plan(problem: Problem, height: int) -> list[Piece]:
    """Cut the map into strips of `height` rows, each with no more sources than it needs."""
    query, source = problem.query.shape[-2], problem.key.shape[-2]
    strips = [slice(at, min(at + height, query)) for at in range(0, query, height)]
    if problem.mask is None or not prod(problem.query.shape[:-1]):
        return [Piece(rows, slice(0, source), slice(0, source)) for rows in strips]
    intervals = problem.mask.intervals(query, source, problem.query.device)
    if intervals is None:
        return [_sparse(problem, rows) for rows in strips]
    spans = _spans(*intervals, query, source, height)
    return [_ranged(rows, span) for rows, span in zip(strips, spans, strict=True)]


def _ranged(rows: slice, span: list[int]) -> Piece:
    start, stop, first, last = span
    if start >= stop:
        return Piece(rows, slice(0, 0), slice(0, 0))
    inside = slice(first - start, last - start) if first < last else slice(0, 0)
    return Piece(rows, slice(start, stop), inside)


def _spans(start: Tensor, stop: Tensor, query: int, source: int, height: int) -> list[list[int]]:
    """For each strip: start and stop of what any row reads, and of what every row reads."""
    start, stop = torch.broadcast_tensors(start.clamp(0, source), stop.clamp(0, source))
    start, stop = start.reshape(-1, query), stop.reshape(-1, query)
    empty = start >= stop
    start, stop = start.masked_fill(empty, source), stop.masked_fill(empty, 0)
    any_row = [(start.amin(0), source, torch.amin), (stop.amax(0), 0, torch.amax)]
    every_row = [(start.amax(0), 0, torch.amax), (stop.amin(0), source, torch.amin)]
    numbers = []
    for edge, neutral, how in any_row + every_row:
        padded = torch.nn.functional.pad(edge, (0, -query % height), value=neutral)
        numbers.append(how(padded.view(-1, height), -1))
    return torch.stack(numbers, -1).tolist()


def _sparse(problem: Problem, rows: slice) -> Piece:
    """Leave out sources that the mask does not list, or those of tiles that are EMPTY."""
    query, source = problem.query.shape[-2], problem.key.shape[-2]
    mask, lines = problem.mask, range(rows.start, rows.stop)
    assert mask is not None
    if source > LISTED:
        columns = mask.sources(lines, problem.sizes)
        if columns is not None and len(columns) <= source // FEW:
            return Piece(rows, columns.to(problem.query.device), slice(0, 0))
    blocks = [range(at, min(at + WIDTH, source)) for at in range(0, source, WIDTH)]
    kinds = [int(mask.block(lines, block, query, source)) for block in blocks]
    kept = [block for block, kind in zip(blocks, kinds, strict=True) if kind]
    if not kept:
        return Piece(rows, slice(0, 0), slice(0, 0))
    start, stop, count = kept[0].start, kept[-1].stop, sum(map(len, kept))
    full = all(kind == 2 for kind in kinds if kind)
    if count > 0.75 * (stop - start):
        full = full and count == stop - start
        return Piece(rows, slice(start, stop), slice(0, count if full else 0))
    columns = torch.cat([torch.arange(block.start, block.stop) for block in kept])
    return Piece(rows, columns.to(problem.query.device), slice(0, count if full else 0))


def take(x: Tensor, at: slice | Tensor) -> Tensor:
    """Rows of x, by range (a view) or by positions (a copy)."""
    return x.index_select(-2, at) if isinstance(at, Tensor) else x[..., at, :]


def take_bias(bias: Tensor, piece: Piece) -> Tensor:
    """The bias of a piece; axes that broadcast stay as they are."""
    if bias.ndim >= 2 and bias.shape[-2] != 1:
        bias = bias[..., piece.rows, :]
    if bias.ndim >= 1 and bias.shape[-1] != 1:
        at = piece.columns
        bias = bias.index_select(-1, at) if isinstance(at, Tensor) else bias[..., at]
    return bias


def weigh(
    problem: Problem,
    piece: Piece,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    finite: bool,
) -> tuple[Strip, Tensor | None]:
    """Scores, weights and log-sum-exp of a piece, and which of its edges are allowed.

    The tensors are those of the piece alone. All operations are differentiable, twice.
    """
    rows, columns = piece.positions(query.device)
    allowed = problem.allowed(rows, columns) if piece.shut else None
    if bias is not None:
        unblocked = bias != -INF
        allowed = unblocked if allowed is None else allowed & unblocked
    scores = dot(query, key, finite) * problem.scale
    if problem.softcap is not None:
        # Blocked scores leave before tanh sees them: an inf there has no gradient.
        scores = scores if allowed is None else torch.where(allowed, scores, 0)
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if allowed is not None:
        scores = torch.where(allowed, scores, -INF)
    weights, lse = _softmax(scores, sinks)
    return Strip(scores, weights, lse, rows, columns, *problem.sizes[2:]), allowed


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    logits = scores
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        logits = torch.cat([scores, column], -1)
    empty = (logits == -INF).all(-1)
    logits = torch.where(empty.unsqueeze(-1), 0, logits)
    lse = torch.where(empty, -INF, torch.logsumexp(logits, -1))
    weights = torch.softmax(logits, -1)[..., : scores.shape[-1]]
    # An allowed score may overflow to -inf: it counts as blocked, without a NaN.
    return torch.where(scores == -INF, 0, weights), lse


def dot(query: Tensor, key: Tensor, finite: bool) -> Tensor:
    """Return query @ key.T, (*batch, head, rows, columns); query heads share a source head.

    A NaN or inf stays with its own edges, in gradients too.
    """
    heads, rows = query.shape[-3:-1]
    if finite:
        return _grouped(query, key.mT, rows)
    bad_query, bad_key = ~query.detach().isfinite(), ~key.detach().isfinite()
    group = heads // max(key.shape[-3], 1)
    bad_source = bad_key.any(-1).repeat_interleave(group, -2)[..., None, :]
    clean = _grouped(torch.where(bad_query, 0, query), torch.where(bad_key, 0, key).mT, rows)
    raw = _grouped(query.detach(), key.detach().mT, rows)
    return torch.where(bad_query.any(-1)[..., :, None] | bad_source, raw, clean)


def mix(
    problem: Problem, strip: Strip, value: Tensor, allowed: Tensor | None, finite: bool
) -> Tensor:
    """Return weights @ value after dropout; a NaN or inf reaches only the rows that may read it."""
    weights = _drop(problem, strip)
    rows = weights.shape[-2]
    if finite:
        return _grouped(weights, value, rows)
    edges = torch.ones_like(weights) if allowed is None else allowed.to(weights).expand_as(weights)
    nan = value.isnan()
    plus = _grouped(edges, (nan | (value == INF)).to(edges), rows) > 0
    minus = _grouped(edges, (nan | (value == -INF)).to(edges), rows) > 0
    non_finite = torch.where(plus, INF, 0.0) + torch.where(minus, -INF, 0.0)
    clean = torch.where(value.detach().isfinite(), value, 0)
    return _grouped(weights, clean, rows) + non_finite.to(weights.dtype)


def _drop(problem: Problem, strip: Strip) -> Tensor:
    if problem.seed is None:
        return strip.weights
    p, lead = problem.dropout, strip.weights.shape[:-2]
    rows, columns, sizes = strip.queries, strip.sources, problem.sizes
    kept = dropout.keep(problem.seed, p, lead, rows, columns, sizes, problem.corner)
    return torch.where(kept, strip.weights * (1 / (1 - p) if p < 1 else 0.0), 0)


def _grouped(left: Tensor, right: Tensor, rows: int) -> Tensor:
    """left @ right, where consecutive heads of left share one of right: no copy of right is made.

    The heads of a group become further rows of one matrix.
    """
    heads, sources = left.shape[-3], right.shape[-3]
    if heads == sources:
        return left @ right
    group = heads // sources
    folded = left.unflatten(-3, (sources, group)).flatten(-3, -2)
    return (folded @ right).unflatten(-2, (group, rows)).flatten(-4, -3)


def height_for(problem: Problem, elements: int, least: int) -> int:
    """How many rows a strip of all heads and samples has, to hold at most `elements`."""
    a_row = max(prod(problem.query.shape[:-2]) * problem.key.shape[-2], 1)
    return max(least, elements // a_row)
