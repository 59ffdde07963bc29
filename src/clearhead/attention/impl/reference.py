"""The reference: attention as one equation on whole matrices, which all others must equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead._core import active_transforms
from clearhead.attention.impl import dropout
from clearhead.attention.problem import Problem
from clearhead.readings import Reading, Strip

INF = float("inf")


class Reference:
    """The equation on whole matrices, in plain torch operations: it serves every call."""

    name = "reference"

    def state(self) -> str:
        """Return "ready": it needs nothing but torch."""
        return "ready"

    def unsupported_reasons(self, problem: Problem, read: tuple[Reading, ...]) -> list[str]:
        """Return nothing: the reference serves every call."""
        return []

    def attend(self, problem: Problem, read: tuple[Reading, ...]) -> tuple[Tensor, list[Any]]:
        """Return softmax(mask(query @ key.T * scale)) @ value, and the values of the readings."""
        dtype, group = problem.dtype, problem.group
        query = problem.query.to(dtype)
        key = problem.key.to(dtype).repeat_interleave(group, -3)
        value = problem.value.to(dtype).repeat_interleave(group, -3)
        rows = torch.arange(query.shape[-2], device=query.device)
        columns = torch.arange(key.shape[-2], device=query.device)

        allowed = _allowed(problem, rows, columns)
        scores = _scores(problem, query, key, allowed)
        weights, lse = _weights(scores, problem.sinks)
        strip = Strip(scores, weights, lse, rows, columns, *problem.sizes[2:])
        values = [reading.finish(reading.part(strip)) for reading in read]

        mixed = _mix(_drop(problem, weights, rows, columns), value, allowed)
        return mixed.to(problem.query.dtype), values

    def readings_only(self, problem: Problem, read: tuple[Reading, ...]) -> list[Any]:
        """Return the values of the readings, without a gradient."""
        with torch.no_grad():
            return self.attend(problem, read)[1]


def _allowed(problem: Problem, rows: Tensor, columns: Tensor) -> Tensor:
    allowed = problem.allowed(rows, columns)
    if problem.bias is not None:
        open_edges = problem.bias != -INF
        allowed = open_edges if allowed is None else allowed & open_edges
    if allowed is None:
        allowed = torch.ones((), dtype=torch.bool, device=rows.device)
    return allowed.expand(*problem.query.shape[:-1], problem.key.shape[-2])


def _scores(problem: Problem, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
    scores = _dot(query, key) * problem.scale
    # Blocked scores leave before anything else touches them: tanh(inf) has no gradient.
    scores = torch.where(allowed, scores, 0.0)
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if problem.bias is not None:
        scores = scores + problem.bias.to(scores.dtype)
    return torch.where(allowed, scores, -INF)


def _weights(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return softmax over the sources and log-sum-exp; a row without any source is 0 and -inf."""
    logits = scores
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        logits = torch.cat([scores, column], -1)
    empty = (logits == -INF).all(-1, keepdim=True)
    logits = torch.where(empty, 0.0, logits)
    lse = torch.where(empty[..., 0], -INF, torch.logsumexp(logits, -1))
    weights = torch.softmax(logits, -1)[..., : scores.shape[-1]]
    return torch.where(scores == -INF, 0.0, weights), lse


def _drop(problem: Problem, weights: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    if problem.seed is None:
        return weights
    p, lead = problem.dropout, weights.shape[:-2]
    factor = 1 / (1 - p) if p < 1 else 0.0
    kept = dropout.keep(problem.seed, p, lead, rows, columns, problem.sizes, problem.corner)
    return torch.where(kept, weights * factor, 0.0)


def _dot(query: Tensor, key: Tensor) -> Tensor:
    """Return query @ key.T, where a NaN or inf stays with its own edges, in gradients too."""
    if _all_finite(query) and _all_finite(key):
        return query @ key.transpose(-2, -1)
    bad_query, bad_key = _non_finite(query), _non_finite(key)
    touched = bad_query.any(-1)[..., :, None] | bad_key.any(-1)[..., None, :]
    clean = torch.where(bad_query, 0.0, query) @ torch.where(bad_key, 0.0, key).transpose(-2, -1)
    return torch.where(touched, query.detach() @ key.detach().transpose(-2, -1), clean)


def _mix(weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Return weights @ value, where a NaN or inf reaches exactly the rows that may read it."""
    if _all_finite(value):
        return weights @ value
    edges = allowed.to(value.dtype)
    plus = edges @ (value.isnan() | (value == INF)).to(value.dtype)
    minus = edges @ (value.isnan() | (value == -INF)).to(value.dtype)
    non_finite = torch.where(plus > 0, INF, 0.0) + torch.where(minus > 0, -INF, 0.0)
    return weights @ torch.where(_non_finite(value), 0.0, value) + non_finite


def _non_finite(x: Tensor) -> Tensor:
    return ~torch.isfinite(x.detach())


def _all_finite(x: Tensor) -> bool:
    """Whether the stored values are known to be finite; they are not known while tracing."""
    if active_transforms() or x.is_meta:
        return False
    return bool(torch.isfinite(x.detach()).all())
