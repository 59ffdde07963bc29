"""Attention in one pass over strips that stay in the cache: context, log-sum-exp and readings.

Scores come in base 2, so that exp2 in place makes weights of them. Where no score can be large,
which the lengths of queries and keys tell, no row needs its maximum subtracted. The weights mix
the values before a reading sees them, so that looking changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import log, prod
from typing import Any

import torch
from torch import Tensor

from clearhead._impl._gather import View, gatherers, tiles_of
from clearhead._impl._strips import Piece, plan, take
from clearhead._impl.problem import Problem
from clearhead.readings import LogSumExp, PerQuery, Reading

__all__ = ["attend", "reach"]

LOG2E, LN2 = 1 / log(2), log(2)
INF = float("inf")
# Rows of a strip, and elements in a buffer: what the second-level cache holds.
ROWS, ELEMENTS = 128, 1 << 19
# Edges of masks that are kept for all strips at once.
KEPT = 1 << 24
# Scores below TAME are far from overflow; with scores up to SMALL in base 2 and values whose sum
# is below LIGHT nothing overflows or vanishes even where no maximum is subtracted.
TAME, SMALL, LIGHT = 1e30, 32.0, 1e18


def reach(problem: Problem) -> float | None:
    """A bound on the scores in base 2; None where this module does not know the call."""
    query, key, value = problem.query, problem.key, problem.value
    if (
        query.device.type != "cpu"
        or problem.bias is not None
        or problem.softcap is not None
        or problem.sinks is not None
        or problem.seed is not None
        or min(query.numel(), key.numel(), value.numel()) == 0
    ):
        return None
    # Comparisons with NaN are False.
    bound = _longest(query) * _longest(key) * abs(problem.scale) * LOG2E
    low, high = torch.aminmax(value.detach())
    size = max(high.item(), -low.item())
    return bound if bound < TAME and size * key.shape[-2] < LIGHT else None


def _longest(x: Tensor) -> float:
    x = x.detach()
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.linalg.vector_norm(wide, dim=-1).max().item()


def attend(
    problem: Problem, wanted: tuple[Reading, ...], bound: float, mix: bool = True
) -> tuple[Tensor | None, Tensor, list[Any]]:
    """Context (unless not to `mix`), log-sum-exp, and parts: None for readings not known here."""
    query, dtype = problem.query, problem.dtype
    lead, rows = query.shape[:-2], query.shape[-2]
    lse = torch.full((prod(lead), rows), -INF, dtype=dtype)
    # Without a mask every row is written.
    make = torch.empty if problem.mask is None else torch.zeros
    context = make(prod(lead), rows, problem.value.shape[-1] if mix else 0, dtype=dtype)
    height = _height(problem)
    found = gatherers(problem, wanted, height)
    busy = [each for each in found if each]
    value = problem.value.flatten(0, -3).to(dtype)
    for view in _views(problem, bound, height, any(each.needs_logs for each in busy)):
        at = (view.leads, view.piece.rows)
        lse[at] = view.lse
        if mix:
            _mix(view, value, context[at])
        if busy:
            view.weights.mul_(view.total.reciprocal().unsqueeze(-1))
        for each in busy:
            each.see(view)
    positions = torch.arange(rows)
    parts: list[Any] = [each and each.part(positions, lead) for each in found]
    for i, reading in enumerate(wanted):
        if type(reading) is LogSumExp:
            parts[i] = PerQuery(positions, (lse.view(*lead, rows),))
    mixed = context.view(*lead, rows, -1).to(query.dtype) if mix else None
    return mixed, lse.view(*lead, rows), parts


def _mix(view: View, value: Tensor, out: Tensor) -> None:
    """The weights' mixture of the values, (lead, rows, value_dim)."""
    leads, rows, width = view.weights.shape
    group = view.problem.group
    sources = slice(view.leads.start // group, view.leads.stop // group)
    folded = view.weights.view(-1, group * rows, width)
    mixed = torch.bmm(folded, take(value[sources], view.piece.columns))
    torch.div(mixed.view(leads, rows, -1), view.total.unsqueeze(-1), out=out)


def _views(problem: Problem, bound: float, height: int, logs_too: bool) -> Iterator[View]:
    """Compute strip after strip; a view is only good until the next one comes."""
    group, dtype = problem.group, problem.dtype
    query, scale = problem.query.flatten(0, -3), problem.scale * LOG2E
    key = problem.key.flatten(0, -3).to(dtype)
    room = [Buffer(dtype), Buffer(dtype)]
    for piece, shut, sources in _jobs(problem, height):
        rows = piece.rows.stop - piece.rows.start
        leads = slice(sources.start * group, sources.stop * group)
        shape = (sources.stop - sources.start, group * rows, piece.width)
        logs = room[0].take(shape)
        lines = (query[leads, piece.rows].to(dtype) * scale).reshape(*shape[:2], -1)
        torch.bmm(lines, take(key[sources], piece.columns).mT, out=logs)
        logs = logs.view(-1, rows, piece.width)
        blocked = [(side, tiles[which[leads]]) for side, tiles, which in shut]
        for side, closed in blocked:
            logs[..., side].masked_fill_(closed, -INF)
        shift = _lower(logs) if bound > SMALL else 0.0
        weights = room[1].take(logs.shape) if logs_too else logs
        torch.exp2(logs, out=weights)
        if logs_too:
            for side, closed in blocked:
                logs[..., side].masked_fill_(closed, 0)
        total = weights.sum(-1)
        lse = (total.log2() + shift) * LN2
        total.masked_fill_(total == 0, 1)
        yield View(problem, piece, leads, weights, logs, total, lse, blocked)


def _height(problem: Problem) -> int:
    """How many rows a strip has."""
    row = problem.group * problem.key.shape[-2]
    return min(max(ELEMENTS // row, 16), ROWS) * _threads()


def _threads() -> int:
    """How many second-level caches there are to fill; many strips are better than a few huge."""
    return min(torch.get_num_threads(), 4)


def _lower(logs: Tensor) -> Tensor:
    """Subtract each row's largest score in place, and return it; 0 for an empty row."""
    top = logs.amax(-1)
    top.masked_fill_(top == -INF, 0)
    logs.sub_(top.unsqueeze(-1))
    return top


def _jobs(problem: Problem, height: int) -> Iterator[tuple[Piece, list[Any], slice]]:
    """Strips with where they are blocked, and the source leads to take together.

    All strips of a head come together, as its keys then stay in the cache, unless what the mask
    blocks is too much to keep.
    """
    leads, held = prod(problem.key.shape[:-2]), height * problem.group
    pieces = [piece for piece in plan(problem, height) if piece.width]
    # The mask may differ between all samples and heads.
    tiles = prod(problem.query.shape[:-2]) if problem.mask is not None else 1
    edges = sum((piece.rows.stop - piece.rows.start) * piece.shut_width for piece in pieces)

    def step(piece: Piece) -> int:
        """How many source leads a buffer holds; narrow strips come with several heads."""
        return max(1, round(ELEMENTS * _threads() / (held * piece.width)))

    for size, alike in groupby(pieces, step):
        chunks = [slice(at, min(at + size, leads)) for at in range(0, leads, size)]
        if edges * tiles <= KEPT:
            ready = [(piece, _shut(problem, piece)) for piece in alike]
            yield from ((*each, chunk) for chunk in chunks for each in ready)
        else:
            each_once = ((piece, _shut(problem, piece)) for piece in alike)
            yield from ((*each, chunk) for each in each_once for chunk in chunks)


def _shut(problem: Problem, piece: Piece) -> list[tuple[slice, Tensor, Tensor]]:
    """Columns of the piece with where they are blocked and which tile each lead has."""
    if not piece.shut:
        return []
    rows, columns = piece.positions(problem.query.device)
    found = ((side, *tiles_of(problem, rows, columns[side])) for side in piece.shut)
    return [(side, ~tiles, which) for side, tiles, which in found]


class Buffer:
    """Memory that grows to the largest strip and is used again."""

    def __init__(self, dtype: torch.dtype):
        self.held = torch.empty(0, dtype=dtype)

    def take(self, shape: tuple[int, ...]) -> Tensor:
        size = prod(shape)
        if len(self.held) < size:
            self.held = torch.empty(size, dtype=self.held.dtype)
        return self.held[:size].view(shape)
