"""A product of weights and values as a call of attention, with batch and head axes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from clearhead._capture.axes import AxisLayout, Fold, Place, fold_of, parted, place_of
from clearhead._capture.call import EagerCall
from clearhead._capture.products.axes import Axes, ValueProduct
from clearhead._capture.provenance import Softmax

__all__ = ["described"]


def described(
    product: ValueProduct, axes: Axes, layout: AxisLayout | None
) -> tuple[EagerCall, Fold]:
    """Describe the attention, and tell how its axes are batch and heads."""
    found, weights = product.softmax, product.weights
    folded = [x.permute(axes.softmax) for x in _unfolded(found, weights)]
    sources, before = axes.value.shape[-2], folded[0].shape[:-2]
    heads = found.heads or (found.scores.shape[-3] if weights.ndim < found.scores.ndim else None)
    place, fold = None, None
    if layout is not None:
        lead, query, source = parted([layout.axes[at] for at in axes.weights])
        place, fold = place_of(layout, lead, query, source), fold_of(lead)
    if fold is None and len(before) == 1 and not heads:
        place = replace(place or Place(), flat=True)
    fold = fold or _fold(before, heads, _groups(axes.value, before))
    scores, made = (fold.split(x) for x in folded)
    spread = axes.value.expand(*before, *axes.value.shape[-2:])
    met = weights.permute(axes.weights)
    dropped = fold.split(met)[..., :sources] if product.origin.dropped else None
    call = EagerCall(
        scores=scores[..., :sources],
        weights=made[..., :sources],
        value=fold.split(spread),
        sink_scores=scores[..., sources:] if sources < scores.shape[-1] else None,
        dropped=dropped,
        scale=found.scale,
        dropout=float(product.origin.dropped),
        place=place,
        proven=not (found.edited or found.divided or product.origin.edited),
    )
    return call, fold


def _unfolded(found: Softmax, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Give scores and weights the axes that the weights have in the product with the value."""
    if weights.ndim == found.scores.ndim:
        return found.scores, found.weights
    return found.scores.flatten(0, 1), found.weights.flatten(0, 1)


def _fold(lead: torch.Size, heads: int | None, groups: bool) -> Fold:
    """Turn the axes before (query, source) into exactly a batch and a head axis."""
    sizes = list(lead)
    if len(sizes) == 1:
        heads = heads if heads and sizes[0] % heads == 0 else 1
        return Fold(sizes[0] // heads, heads)
    if not sizes:
        return Fold(1, 1)
    if groups:
        return Fold(math.prod(sizes[:-2]), sizes[-2] * sizes[-1])
    return Fold(math.prod(sizes[:-1]), sizes[-1])


def _groups(value: Tensor, lead: torch.Size) -> bool:
    """Whether the last of three lead axes is a group of heads that share one value."""
    if len(lead) < 3 or lead[-1] == 1 or value.ndim < 3:
        return False
    return value.shape[-3] == 1 or value.stride(-3) == 0
