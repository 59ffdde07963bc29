"""The mask arguments of `MultiheadAttention`: checked, and composed to edges and a bias."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead import masks
from clearhead._core import Sizes, active_transforms, type_error, value_error
from clearhead.attention import warn_if_backwards
from clearhead.layers.checks import LayerSizes
from clearhead.masks import MAY_ATTEND, Mask, no_mask

__all__ = ["MaskArguments"]


class MaskArguments:
    """All that blocks or shifts a score in one call, in our polarity and in torch's.

    `mask` has True where a query may attend; in `attn_mask` and `key_padding_mask` True blocks,
    and floats are added to the scores.
    """

    def __init__(
        self,
        sizes: LayerSizes,
        query: Tensor,
        mask: Mask | Tensor | None,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        _check_torch_masks(sizes, query, key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        self.sizes, self.mask, self.is_causal = sizes, mask, is_causal
        self.attn_mask = None if attn_mask is None else _per_head(attn_mask, sizes)
        self.padding = _padding(key_padding_mask, sizes)

    def edges(self, appended: int) -> Mask | None:
        """Compose all that blocks; `appended` sources are open to every query."""
        parts: list[Mask] = [masks.causal()] if self.is_causal else []
        if self.mask is not None:
            parts.append(_as_mask(self.mask, self.sizes))
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            parts.append(masks.dense(~self.attn_mask))
        if self.padding.real is not None:
            parts.append(masks.keep(self.padding.real))
        if not parts:
            return None
        edges = functools.reduce(operator.and_, parts)
        return edges.appended(appended) if appended else edges

    def bias(self, appended: int) -> Tensor | None:
        """Add up all that is added to the scores."""
        parts = [] if self.padding.bias is None else [self.padding.bias]
        if self.attn_mask is not None and self.attn_mask.dtype != torch.bool:
            parts.append(self.attn_mask)
        if not parts:
            return None
        bias = functools.reduce(operator.add, parts)
        return torch.nn.functional.pad(bias, (0, appended)) if appended else bias


def _check_torch_masks(sizes: LayerSizes, query: Tensor, **given: Any) -> None:
    """Check key_padding_mask and attn_mask, in which True blocks and floats are added."""
    for name, mask in given.items():
        if mask is None:
            continue
        _check_type(name, mask)
        if mask.device != query.device:
            got = f"{mask.device} beside {query.device}"
            raise value_error(name, "is on the device of query", got=got)
        fitting = _fitting_shapes(name, sizes)
        if tuple(mask.shape) not in fitting.values():
            raise value_error(
                name,
                "is " + " or ".join(f"{axes} = {shape}" for axes, shape in fitting.items()),
                shapes={name: mask, "query": query},
                hint="masks of other shapes go into mask=, where True means may attend",
            )
        _check_disguise(name, mask)


def _fitting_shapes(name: str, sizes: LayerSizes) -> dict[str, tuple[int, ...]]:
    """The shapes that torch allows for one of its masks, by their axes."""
    batch, heads, query, source, batched = sizes
    if name == "key_padding_mask":
        return {"(batch, source)": (batch, source)} if batched else {"(source,)": (source,)}
    return {
        "(query, source)": (query, source),
        "(batch * head, query, source)": (batch * heads, query, source),
    }


def _check_type(name: str, mask: Any) -> None:
    rule = "is a bool tensor (True = blocked) or a float tensor (added to the scores)"
    if isinstance(mask, Mask):
        raise type_error(name, rule, got="a Mask", hint="pass a Mask as mask=")
    if not isinstance(mask, Tensor):
        raise type_error(name, rule, got=type(mask).__name__, hint="wrap it in torch.as_tensor")
    if mask.is_floating_point() and mask.dtype.itemsize < 2:
        hint = f"float8 holds no numbers to compute with: {name}.float()"
        raise type_error(name, rule, got=mask.dtype, shapes={name: mask}, hint=hint)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        hint = f"say which number blocks, for example {name} == 0"
        raise type_error(name, rule, got=mask.dtype, shapes={name: mask}, hint=hint)


def _check_disguise(name: str, mask: Tensor) -> None:
    """Refuse a float mask of zeros and ones, which is nearly always a bool mask in disguise.

    A mask that requires a gradient is a learned bias, whatever its initial values.
    """
    if mask.dtype == torch.bool or mask.requires_grad or not mask.numel() or _hidden(mask):
        return
    low, high = torch.aminmax(mask)
    if high == 1 and low >= 0 and bool(((mask == 0) | (mask == 1)).all()):
        raise value_error(
            name,
            "holds only 0 and 1, which would be added to the scores and block nothing",
            shapes={name: mask},
            hint=f"pass {name} == 0 if 1 means may attend, {name} == 1 if 1 means blocked",
        )


def _hidden(x: Tensor) -> bool:
    """Whether the stored values are unknown: the call is traced, or the tensor has no storage."""
    return x.is_meta or bool(active_transforms())


def _per_head(mask: Tensor, sizes: LayerSizes) -> Tensor:
    """(batch * head, query, source) -> (batch, head, query, source)."""
    return mask.reshape(sizes.batch, sizes.heads, *mask.shape[1:]) if mask.ndim == 3 else mask


class Padding(NamedTuple):
    """`key_padding_mask` as the sources that are real, or as a bias; both None without one."""

    real: Tensor | None = None
    bias: Tensor | None = None


def _padding(mask: Tensor | None, sizes: LayerSizes) -> Padding:
    if mask is None:
        return Padding()
    if mask.dtype == torch.bool:
        return Padding(real=~mask)
    # Whole encoder stacks turn their bool masks into floats. As edges they need no sum of size
    # (batch, query, source) beside a mask.
    if not (mask.requires_grad or _hidden(mask)):
        real = mask == 0
        if bool((real | (mask == -torch.inf)).all()):
            return Padding(real=real)
    return Padding(bias=mask.reshape(sizes.batch, 1, 1, sizes.source))


def _as_mask(mask: Any, sizes: LayerSizes) -> Mask:
    """Return `mask=` as a `Mask`; a bool tensor must broadcast to the scores."""
    if isinstance(mask, Mask):
        mask.check(Sizes(*sizes[:4]))
        return mask
    if not isinstance(mask, Tensor):
        raise no_mask("mask", mask)
    if mask.dtype != torch.bool:
        float_hint = "floats that are added to the scores go into attn_mask="
        hint = float_hint if mask.is_floating_point() else "say which number may attend: mask == 1"
        raise type_error("mask", MAY_ATTEND, got=mask.dtype, shapes={"mask": mask}, hint=hint)
    _check_broadcasts(mask, sizes)
    warn_if_backwards(mask)
    whole = mask.unsqueeze(1) if mask.ndim == 3 and sizes.batched else mask
    whole = whole.expand(*whole.shape[:-2], sizes.query, sizes.source)
    return masks.dense(whole if whole.ndim != 3 else whole.unsqueeze(0))


def _check_broadcasts(mask: Tensor, sizes: LayerSizes) -> None:
    """Refuse a bool tensor that does not broadcast to the scores."""
    rank = mask.ndim + (mask.ndim == 3 and sizes.batched)
    shape = (mask.shape[0], 1, *mask.shape[1:]) if rank > mask.ndim else tuple(mask.shape)
    scores = tuple(sizes[:4])
    if rank in (2, 3, 4) and all(
        size in (1, full) for size, full in zip(shape, scores[4 - rank :], strict=True)
    ):
        return
    axes = "(batch, query, source)" if sizes.batched else "(head, query, source)"
    raise value_error(
        "mask",
        f"broadcasts to (query, source), {axes} or (batch, head, query, source)",
        shapes={"mask": mask, "scores": scores},
        hint="make each axis 1 or the size of the scores; padding is masks.keep(real)",
    )
