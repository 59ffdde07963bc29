"""Attention once more, independent of the library: float64, row by row, only over allowed sources.

Nothing here is shared with the implementations: no matrix product, no softmax, no mask object. A
source that a row may not read is never touched, so what is stored there cannot matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Answer:
    """What the oracle knows of one call; arrays are (*batch, head, ...), in float64."""

    context: np.ndarray
    weights: np.ndarray
    scores: np.ndarray
    lse: np.ndarray


def attend(
    query: Any,
    key: Any,
    value: Any,
    allowed: Any = None,
    *,
    scale: float | None = None,
    bias: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    kept: Any = None,
    dropout: float = 0.0,
) -> Answer:
    """Attend in plain float64. `allowed`, `bias` and `kept` broadcast to the scores."""
    query, key, value = array(query), array(key), array(value)
    flat = query.ndim - 3  # axes before the head axis; -1 and 0 for inputs without one
    if flat < 1:
        lifted = (x.reshape(*x.shape[:-2], 1, *x.shape[-2:]) for x in (query, key, value))
        allowed, bias, kept = (_lift(x, query.ndim) for x in (allowed, bias, kept))
        query, key, value = lifted
    *batch, heads, rows, width = query.shape
    sources = key.shape[-2]
    shape = (*batch, heads, rows, sources)
    scale = (1 / math.sqrt(width) if width else 1.0) if scale is None else scale
    allowed = np.broadcast_to(True if allowed is None else array(allowed, bool), shape)
    bias = np.broadcast_to(0.0 if bias is None else array(bias), shape)
    kept = np.broadcast_to(True if kept is None else array(kept, bool), shape)

    answer = Answer(
        context=np.zeros((*batch, heads, rows, value.shape[-1])),
        weights=np.zeros(shape),
        scores=np.full(shape, -math.inf),
        lse=np.full((*batch, heads, rows), -math.inf),
    )
    group = heads // max(key.shape[-3], 1)
    with np.errstate(all="ignore"):
        for where in np.ndindex(*batch, heads, rows):
            *lead, head, _row = where
            at = (*lead, head // group)
            use = [j for j in range(sources) if allowed[where][j] and bias[where][j] != -math.inf]
            logits = []
            for j in use:
                s = scale * float(np.sum(query[where] * key[(*at, j)]))
                s = softcap * math.tanh(s / softcap) if softcap is not None else s
                logits.append(s + float(bias[where][j]))
            everything = list(logits) + ([] if sinks is None else [float(array(sinks)[head])])
            lse = _log_sum_exp(everything)
            answer.lse[where] = lse
            for j, s in zip(use, logits, strict=True):
                weight = 0.0 if s == -math.inf else float(np.exp(s - lse))
                answer.scores[where][j] = s
                answer.weights[where][j] = weight
                mixed = weight / (1 - dropout) if dropout < 1 else 0.0
                answer.context[where] += (mixed if kept[where][j] else 0.0) * value[(*at, j)]
    return _lowered(answer) if flat < 1 else answer


def _log_sum_exp(logits: list[float]) -> float:
    if any(math.isnan(s) for s in logits):
        return math.nan
    top = max(logits, default=-math.inf)
    if math.isinf(top):
        return top
    return top + math.log(math.fsum(math.exp(s - top) for s in logits))


def _lift(x: Any, rank: int) -> Any:
    if x is None:
        return None
    x = array(x, None)
    return x[:, None] if rank == 3 and x.ndim == 3 else x


def _lowered(answer: Answer) -> Answer:
    axis = {name: -2 if name == "lse" else -3 for name in vars(answer)}
    return Answer(**{name: np.squeeze(x, axis[name]) for name, x in vars(answer).items()})


def array(x: Any, dtype: Any = np.float64) -> np.ndarray:
    """Return the numbers as numpy; bfloat16 and float16 go through float64."""
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        x = x.double().numpy() if x.is_floating_point() else x.numpy()
    return np.asarray(x, dtype=dtype)


def entropy(answer: Answer) -> np.ndarray:
    def of(row: np.ndarray) -> float:
        return -math.fsum(w * math.log(w) for w in row if w > 0)

    return _per_row(of, answer.weights)


def received(answer: Answer) -> np.ndarray:
    total = np.zeros((*answer.weights.shape[:-2], answer.weights.shape[-1]))
    for where in np.ndindex(*answer.weights.shape):
        total[(*where[:-2], where[-1])] += answer.weights[where]
    return total


def mass(answer: Answer, edges: Any) -> np.ndarray:
    edges = np.broadcast_to(array(edges, bool), answer.weights.shape)
    total = np.zeros(answer.weights.shape[:-1])
    for where in np.ndindex(*answer.weights.shape):
        total[where[:-1]] += answer.weights[where] if edges[where] else 0.0
    return total


def distance(answer: Answer) -> np.ndarray:
    *_, queries, sources = answer.weights.shape
    total = np.zeros(answer.weights.shape[:-1])
    for where in np.ndindex(*answer.weights.shape):
        i, j = where[-2] + sources - queries, where[-1]
        total[where[:-1]] += answer.weights[where] * abs(i - j)
    return total


def top(answer: Answer, k: int) -> tuple[np.ndarray, np.ndarray]:
    lead = answer.weights.shape[:-1]
    weights, sources = np.zeros((*lead, k)), np.full((*lead, k), -1)
    for where in np.ndindex(*lead):
        row, scores = answer.weights[where], answer.scores[where]
        order = sorted((-w, j) for j, w in enumerate(row) if scores[j] != -math.inf)
        for place, (w, j) in enumerate(order[:k]):
            weights[where][place], sources[where][place] = -w, j
    return weights, sources


def _per_row(of: Any, rows: np.ndarray) -> np.ndarray:
    out = np.zeros(rows.shape[:-1])
    for where in np.ndindex(*rows.shape[:-1]):
        out[where] = of(rows[where])
    return out


def error(got: Tensor, right: Any) -> float:
    """Return the largest difference; infinite where only one is NaN or the infinities differ."""
    ours, right = array(got), array(right)
    assert ours.shape == right.shape, (ours.shape, right.shape)
    with np.errstate(all="ignore"):
        same = (ours == right) | (np.isnan(ours) & np.isnan(right))
        gap = np.where(same, 0.0, np.abs(ours - right))
    return float(np.nan_to_num(gap, nan=math.inf).max(initial=0.0))


def budget(naive: Tensor, right: Any, dtype: torch.dtype) -> float:
    """How far an answer may be off: twice what naive torch is off, and one rounding."""
    right = array(right)
    finite = np.abs(right[np.isfinite(right)])
    return 2 * error(naive, right) + torch.finfo(dtype).eps * max(1.0, finite.max(initial=0.0))
