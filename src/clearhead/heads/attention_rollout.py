"""Attention rollout for chosen rows, as a chain of row-weighted sums over strips."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from clearhead._capture import Call, Handler, attached, call_strip, call_with
from clearhead._core import value_error

__all__ = ["Rollout", "rollout"]

# Numbers in one strip of weights: 4 MiB of float32.
_STRIP = 1 << 20


class Rollout(NamedTuple):
    """The value of `rollout`, with the choices that it depends on."""

    weights: Tensor  # (batch, chosen, source)
    queries: tuple[int, ...]
    residual: float
    heads: str
    layers: int


@torch.no_grad()
def rollout(
    model: nn.Module,
    inputs: Any,
    queries: Sequence[int] | int = -1,
    *,
    residual: float = 0.5,
    heads: Literal["mean", "max"] = "mean",
) -> Rollout:
    """Follow the attention of chosen positions through all layers down to the input.

    >>> from clearhead import models
    >>> model = models.load()
    >>> rolled = rollout(model, model.vocabulary.encode("hell")[None])
    >>> rolled.weights.shape, rolled.residual, rolled.heads
    (torch.Size([1, 1, 4]), 0.5, 'mean')

    R = A_L ... A_1, where A_l = residual * I + (1 - residual) * mean_h W_l,h with its rows
    normalised to one (Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", who
    take residual 0.5). Only the chosen rows of R are made, from the last layer down: one weighted
    sum of rows a layer, no (query, source) matrix. The queries and keys of all layers are kept
    meanwhile; handwritten attention computes whole maps, and these are kept too.

    `inputs` is a tensor, a tuple of arguments, or keywords: a dict, or what a tokenizer returns.
    `heads="max"` takes the largest weight over the heads. Rollout mixes heads and leaves out values
    and the layers between: it says where information may have come from, not what made a
    difference.
    """
    if not 0 <= residual < 1:
        raise value_error("residual", "is a share, 0 <= residual < 1", got=residual)
    if heads not in ("mean", "max"):
        raise value_error("heads", "is 'mean' or 'max'", got=repr(heads))
    calls = _calls(model, inputs)
    batch, _, position, _ = calls[-1].sizes
    chosen = _chosen(queries, position)
    rows = torch.zeros(batch, len(chosen), position, dtype=torch.float64)
    rows[:, torch.arange(len(chosen)), list(chosen)] = 1
    for call in reversed(calls):
        rows = _step(call, rows, residual, heads)
    return Rollout(rows.float(), chosen, residual, heads, len(calls))


def _chosen(queries: Sequence[int] | int, position: int) -> tuple[int, ...]:
    given = (queries,) if isinstance(queries, int) else tuple(queries)
    for query in given:
        if not -position <= query < position:
            raise value_error("queries", f"lie in 0..{position - 1}", got=query)
    return tuple(query % position for query in given)


class _Keeper(Handler):
    """Keeps every call, as the last one is needed first."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def after(self, call: Call, context: Tensor) -> None:
        """Keep a call."""
        self.calls.append(call)


def _calls(model: nn.Module, inputs: Any) -> list[Call]:
    keeper = _Keeper()
    with attached(model, keeper):
        call_with(functools.partial(model, **_uncached(model)), inputs)
    if not keeper.calls:
        raise RuntimeError("rollout: no attention call of the model was seen")
    sizes = {(*call.sizes[::2], call.sizes[3]) for call in keeper.calls}
    if len(sizes) > 1 or any(query != source for _, query, source in sizes):
        raise value_error(
            "model",
            "needs self-attention over the same positions in every layer",
            got=f"(batch, query, source) of {', '.join(map(str, sorted(sizes)))}",
        )
    if not all(min(size) for size in sizes):
        raise value_error("inputs", "have a sample and a position", got="none of them")
    return keeper.calls


def _uncached(model: nn.Module) -> dict[str, Any]:
    """Ask for no cache, which would write over keys that are still needed."""
    names = inspect.signature(getattr(model, "forward", model)).parameters
    return {"use_cache": False} if "use_cache" in names else {}


def _step(call: Call, rows: Tensor, residual: float, heads: str) -> Tensor:
    """Multiply (batch, chosen, query) by one layer's matrix, strip by strip of its queries."""
    batch, count, position, source = call.sizes
    step = max(1, _STRIP // max(1, batch * count * source))
    below = torch.zeros(batch, rows.shape[1], source, dtype=rows.dtype)
    mix: Callable[..., Tensor] = torch.mean if heads == "mean" else torch.amax
    for start in range(0, position, step):
        at = torch.arange(start, min(start + step, position))
        weights = call_strip(call, at.tolist()).weights
        mixed = mix(weights, dim=1).to(rows) * (1 - residual)
        mixed[:, torch.arange(len(at)), at] += residual
        total = mixed.sum(-1, keepdim=True)
        below += rows[..., at] @ (mixed / total.where(total > 0, 1))
    return below
