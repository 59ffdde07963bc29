"""The calls of the attention functions of torch and clearhead, in clearhead's terms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead import masks
from clearhead._capture.call import Call, EagerCall, FusedCall
from clearhead._core import plain
from clearhead.attention import make_problem

__all__ = ["Additive", "from_attend", "from_flex", "from_sdpa", "lead_of", "split_additive"]

# The masks of `is_causal`.
_SQUARE, _FROM_THE_START = masks.causal(), masks.causal(align="start")


@dataclass(frozen=True, eq=False)
class Additive:
    """An additive mask in two parts: which edges it allows, and what it adds to those."""

    allowed: Tensor | None
    bias: Tensor | None
    closed: Tensor | None  # rows blocked by a finite constant: the softmax makes them uniform

    def rank4(self, lead: torch.Size, ndim: int, sizes: tuple[int, int]) -> Additive:
        """Expand the parts to (batch, head, query, source), beside inputs of `ndim` axes."""
        query, source = sizes

        def whole(x: Tensor | None, source: int) -> Tensor | None:
            x = None if x is None else _mask_rank4(x, lead, ndim)
            return None if x is None else x.expand(*x.shape[:2], query, source)

        return Additive(
            whole(self.allowed, source), whole(self.bias, source), whole(self.closed, 1)
        )


def split_additive(mask: Tensor) -> Additive:
    """Separate blocking entries (-inf, or about the lowest finite number) from a bias.

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
    added = mask.masked_fill(blocked, 0)
    if bool((added != 0).any()):
        bias = added
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
    split: Callable[[Tensor], Additive] = split_additive,
) -> FusedCall:
    """Describe a call of `F.scaled_dot_product_attention`; its causal mask aligns at the start."""
    lead = lead_of(query, key, value)
    sizes = query.shape[-2], key.shape[-2]
    parts = Additive(None, None, None)
    if attn_mask is not None:
        whole = attn_mask.dtype == torch.bool
        parts = Additive(attn_mask, None, None) if whole else split(attn_mask)
        parts = parts.rank4(lead, query.ndim, sizes)
    mask = None if parts.allowed is None else masks.dense(plain(parts.allowed))
    if is_causal:
        causal = _SQUARE if sizes[0] == sizes[1] else _FROM_THE_START
        mask = causal if mask is None else mask & causal
    query, key, value = (_input_rank4(x, lead, query.ndim) for x in (query, key, value))
    if parts.closed is not None:
        # A query of zeros weighs all its sources alike, as the swamped row does.
        query = torch.where(parts.closed, torch.zeros((), dtype=query.dtype), query)
    one = key.shape[1] == value.shape[1] == 1  # which all heads share, as grouped ones do
    if not enable_gqa and not one and not query.shape[1] == key.shape[1] == value.shape[1]:
        key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    return FusedCall(query, key, value, mask, parts.bias, scale=scale, dropout=dropout_p)


def lead_of(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """Give the batch axes that the inputs of a kernel broadcast to."""
    first, *others = (x.shape[:-3] for x in (query, key, value))
    if all(other == first for other in others):
        return first
    return torch.broadcast_shapes(first, *others)


def _input_rank4(x: Tensor, lead: torch.Size, ndim: int) -> Tensor:
    """Give query, key or value exactly one batch and one head axis, where they have `ndim` axes."""
    if ndim == 2:
        return x[None, None]
    if ndim == 3:
        return x[:, None]
    if x.shape[:-3] == lead and len(lead) == 1:
        return x
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])


def _mask_rank4(mask: Tensor, lead: torch.Size, ndim: int) -> Tensor:
    """Give a mask exactly one batch and one head axis, beside inputs of `ndim` axes."""
    if ndim == 2:
        return mask[None, None]
    if ndim == 3:
        # Without a head axis the first of three axes is the batch.
        return mask[:, None] if mask.ndim == 3 else mask[None, None]
    if mask.ndim < 4 or all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape((1,) * max(4 - mask.ndim, 0) + mask.shape[max(mask.ndim - 4, 0) :])
    return mask.expand(*lead, *mask.shape[-3:]).reshape(math.prod(lead), *mask.shape[-3:])


def from_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any = None,
    *,
    dropout: float = 0.0,
    read: Any = None,
    impl: Any = None,
    **options: Any,
) -> FusedCall:
    """Describe a call of `clearhead.attend`, which has checked its arguments."""
    names = ("scale", "bias", "softcap", "sinks")
    given: list[Any] = [options.get(name) for name in names]
    problem = make_problem(query, key, value, mask, *given)
    lead = problem.query.shape[:-3]
    tensors = (problem.query, problem.key, problem.value)
    query, key, value = (x.reshape(math.prod(lead), *x.shape[-3:]) for x in tensors)
    bias = problem.bias
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape)) if bias.ndim < 4 else bias
        bias = bias.expand(*lead, *bias.shape[-3:]).reshape(len(query), *bias.shape[-3:])
        bias = bias.expand(-1, -1, query.shape[2], key.shape[2])
    return FusedCall(
        query, key, value, problem.mask, bias, problem.softcap, problem.sinks,
        scale=problem.scale, dropout=dropout, how="attend",
    )  # fmt: skip


def from_flex(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float
) -> Call:
    """Describe a call of the operator below `flex_attention`.

    Where it has a `score_mod` the scores and weights are computed here: no other kernel takes one.
    """
    mask = masks.where(block_mask[-1])
    call = FusedCall(query, key, value, mask, scale=scale, how="flex_attention")
    if getattr(score_mod, "__name__", "") == "_identity":
        return call
    scores = _modified_scores(call, score_mod)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return EagerCall(scores, weights, value, key, scale=scale, how="flex_attention")


def _modified_scores(call: FusedCall, score_mod: Any) -> Tensor:
    """Compute the masked scores, (batch, head, query, source), as a `score_mod` makes them."""
    batch, heads, count, width = call.query.shape
    shared = call.query.to(call.problem.dtype).reshape(batch, call.source_heads, -1, width)
    scores = (shared @ call.key.to(shared.dtype).mT).reshape(batch, heads, count, -1)
    scores = scores * call.score_scale
    for axis in range(3, -1, -1):
        inside: list[Any] = [None, None, None, None]
        inside[axis] = 0
        score_mod = torch.vmap(score_mod, in_dims=(0, *inside))
    scores = score_mod(scores, *(torch.arange(size, device=call.device) for size in call.sizes))
    assert call.mask is not None
    edges = call.mask.dense(count, call.sizes.source, batch=batch, head=heads, device=call.device)
    return scores.masked_fill(~edges, -math.inf)
