"""One attention call of a model, in clearhead's own terms, however the model makes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clearhead import masks
from clearhead._core import Sizes
from clearhead.attention import Problem, api
from clearhead.masks import Mask

__all__ = ["Additive", "Call", "from_attend", "from_flex", "from_sdpa", "split_additive"]


@dataclass(frozen=True, eq=False)
class Call:
    """What a model asked for: tensors with batch and head axes, and where in the model it was.

    A call written by hand, or on an eager backend, has `scores` and `weights` as the model made
    them (`weights` once the softmax has run), and no query and key.
    """

    query: Tensor | None  # (batch, head, query, head_dim)
    key: Tensor | None  # (batch, source_head, source, head_dim)
    value: Tensor | None  # (batch, source_head, source, value_dim)
    mask: Mask | None = None
    bias: Tensor | None = None  # broadcasts to (batch, head, query, source)
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    scores: Tensor | None = None  # (batch, head, query, source)
    weights: Tensor | None = None  # the same, before dropout
    lse: Tensor | None = None  # (batch, head, query), of the scores with the sinks
    rest: Tensor | None = None  # scores in the softmax that have no source: sinks by hand
    dropped: Tensor | None = None  # the weights as they met the value, where dropout was on
    how: str = "sdpa"
    module: str = ""
    layer: int = 0
    call: int = 0
    kind: str = "self"

    @property
    def sizes(self) -> Sizes:
        """Batch, (query) heads, queries and sources."""
        if self.scores is not None:
            batch, head, query, source = self.scores.shape
            return Sizes(batch, head, query, source)
        assert self.query is not None
        assert self.key is not None
        batch, head, query, _ = self.query.shape
        return Sizes(batch, head, query, self.key.shape[-2])

    @property
    def problem(self) -> Problem:
        """The call as every implementation of `attend` receives it."""
        assert self.query is not None
        assert self.key is not None
        assert self.value is not None
        scale = 1 / math.sqrt(max(self.query.shape[-1], 1)) if self.scale is None else self.scale
        return Problem(
            self.query,
            self.key,
            self.value,
            self.mask,
            scale,
            bias=self.bias,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def but(self, **changes: Any) -> Call:
        """Give the same call with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, eq=False)
class Additive:
    """An additive mask, told apart: which edges it allows, and what it adds to those."""

    allowed: Tensor | None
    bias: Tensor | None
    closed: Tensor | None  # rows blocked by a finite constant: the softmax makes them uniform


def split_additive(mask: Tensor) -> Additive:
    """Tell blocking entries (-inf, or about the lowest finite number) from a bias.

    A row that holds nothing but a finite constant blocks nothing: adding it swamps the scores, so
    that the model weighs all its sources alike. Such rows are `closed`.
    """
    floor = torch.finfo(mask.dtype).min / 2
    blocked = mask <= floor
    allowed = closed = bias = None
    if bool(blocked.any()):
        finite = (blocked & (mask > -math.inf)).all(-1, keepdim=True)
        allowed = ~blocked | finite
        closed = finite if bool(finite.any()) else None
    rest = mask.masked_fill(blocked, 0)
    if bool((rest != 0).any()):
        bias = rest
    return Additive(allowed, bias, closed)


def from_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    split: Any = split_additive,
) -> Call:
    """Describe a call of `F.scaled_dot_product_attention`; its causal mask stands at the start."""
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = query.shape[-3] if query.ndim > 2 else 1
    mask: Mask | None = None
    bias = closed = None
    if attn_mask is not None:
        attn_mask = _four(attn_mask, lead, heads, query.ndim)
        attn_mask = attn_mask.expand(*attn_mask.shape[:2], query.shape[-2], key.shape[-2])
        if attn_mask.dtype == torch.bool:
            mask = masks.dense(attn_mask)
        else:
            parts = split(attn_mask)
            bias, closed = parts.bias, parts.closed
            mask = None if parts.allowed is None else masks.dense(parts.allowed)
    if is_causal:
        square = query.shape[-2] == key.shape[-2]
        causal = masks.causal() if square else masks.causal(align="start")
        mask = causal if mask is None else mask & causal
    query, key, value = (_four(x, lead, None, query.ndim) for x in (query, key, value))
    if closed is not None:
        # a query of zeros weighs all its sources alike, as the swamped row does
        query = torch.where(closed, torch.zeros((), dtype=query.dtype), query)
    one = key.shape[1] == value.shape[1] == 1  # which all heads share, as grouped ones do
    if not enable_gqa and not one and not query.shape[1] == key.shape[1] == value.shape[1]:
        key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    return Call(query, key, value, mask, bias, scale, dropout=dropout_p)


def from_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any = None,
    *,
    read: Any = None,
    impl: Any = None,
    dropout: float = 0.0,
    **options: Any,
) -> Call:
    """Describe a call of `clearhead.attend`, which it has checked."""
    names = ("scale", "bias", "softcap", "sinks")
    given: list[Any] = [options.get(name) for name in names]
    problem = api._problem(query, key, value, mask, *given, dropout=0.0)
    batch = math.prod(problem.query.shape[:-3])
    query, key, value = (
        x.reshape(batch, *x.shape[-3:]) for x in (problem.query, problem.key, problem.value)
    )
    bias = problem.bias
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape)) if bias.ndim < 4 else bias
        lead = problem.query.shape[:-3]
        bias = bias.expand(*lead, *bias.shape[-3:]).reshape(batch, *bias.shape[-3:])
        bias = bias.expand(-1, -1, query.shape[2], key.shape[2])
    return Call(
        query, key, value, problem.mask, bias, problem.scale, problem.softcap, problem.sinks,
        dropout, how="attend",
    )  # fmt: skip


def from_flex(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float
) -> Call:
    """Describe a call of the operator below `flex_attention`."""
    mask = masks.where(block_mask[-1])
    call = Call(query, key, value, mask, scale=scale, how="flex_attention")
    if getattr(score_mod, "__name__", "") == "_identity":
        return call
    batch, heads, count, width = query.shape
    shared = query.to(call.problem.dtype).reshape(batch, key.shape[1], -1, width)
    scores = (shared @ key.to(shared.dtype).mT).reshape(batch, heads, count, -1) * scale
    sizes = (batch, heads, count, key.shape[2])
    for axis in range(3, -1, -1):
        inside: list[Any] = [None, None, None, None]
        inside[axis] = 0
        score_mod = torch.vmap(score_mod, in_dims=(0, *inside))
    scores = score_mod(scores, *(torch.arange(size, device=query.device) for size in sizes))
    edges = mask.dense(count, key.shape[2], batch=batch, head=heads, device=query.device)
    scores = scores.masked_fill(~edges, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return call.but(scores=scores, weights=weights, lse=lse)


def _four(x: Tensor, lead: torch.Size, heads: int | None, ndim: int) -> Tensor:
    """Give a tensor exactly one batch and one head axis, beside inputs of `ndim` axes."""
    mask = heads is not None
    if ndim == 2:
        return x[None, None]
    if ndim == 3:
        # without a head axis the first of three axes is the batch
        return x[:, None] if x.ndim == 3 else x[None, None]
    if mask and (x.ndim < 4 or all(size == 1 for size in x.shape[:-3])):
        return x.reshape((1,) * max(4 - x.ndim, 0) + x.shape[max(x.ndim - 4, 0) :])
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])
