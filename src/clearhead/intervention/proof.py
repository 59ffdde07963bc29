"""The proof that a captured call is what a cut assumes, on every row that the cut touches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead._capture import (
    Call,
    EagerCall,
    FusedCall,
    context_difference,
    rounding_bound,
    softmax_difference,
)
from clearhead.intervention.cuts import Cut

__all__ = ["is_spread", "named", "prove", "prove_alone", "prove_order", "prove_place"]

# Rows of a kernel's context that are recomputed, and a factor on what its scores may round.
_SAMPLED = 4
_SLACK = 4.0


def named(call: Call) -> str:
    """Name a call in the words of an error."""
    return f"layer {call.layer} ({call.module or 'the model'})"


def prove_place(call: Call, cuts: Sequence[Cut]) -> None:
    """Raise where a cut is of samples or heads that are others in the whole map."""
    rows = call.place.rows if call.place else ""
    if rows and not all(cut.alike for cut in cuts):
        raise RuntimeError(
            f"{named(call)}: {rows}, so that the heads and samples of a call are not those of the "
            "layer; cut edges in all heads, or turn the slices off"
        )


def is_spread(call: Call) -> bool:
    """Whether other ranks have the other queries of a call."""
    return isinstance(call, FusedCall) and call.spread is not None


def prove_alone(call: Call) -> None:
    """Raise where a gradient would have to reach the keys and values of other ranks."""
    tensors = (call.query, call.key, call.value) if isinstance(call, FusedCall) else ()
    if is_spread(call) and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{named(call)}: its positions are split over ranks, and a cut gives no gradient to "
            "those of the others; run the model under torch.no_grad()"
        )


def prove_order(call: Call) -> None:
    """Raise where the positions of a call are not in the order of the whole map."""
    if call.place is not None and call.place.mixed:
        raise RuntimeError(
            f"{named(call)}: its edges cannot be cut: it {call.place.mixed}, so that its positions "
            "are not those of the model; cut whole heads"
        )


@torch.no_grad()
def prove(call: Call, own: Tensor, rows: list[int], *, softmax: bool) -> None:
    """Raise unless the context is weights times values and, with `softmax`, these are a softmax.

    Of the rows of a kernel, which makes every row alike, some are enough.
    """
    if isinstance(call, EagerCall):
        if softmax:
            _prove_softmax(call, rows)
    elif len(rows) > _SAMPLED:
        rows = [rows[at * (len(rows) - 1) // (_SAMPLED - 1)] for at in range(_SAMPLED)]
    _prove_context(call, own, rows)


def _prove_softmax(call: EagerCall, rows: list[int]) -> None:
    off = softmax_difference(call, rows)
    if off is not None:
        raise RuntimeError(
            f"{named(call)}: its edges cannot be cut: its weights are no softmax of its scores; "
            f"they differ by {off:.2g}, so that the weights of the edges that remain are not known"
        )


def _prove_context(call: Call, own: Tensor, rows: list[int]) -> None:
    off = context_difference(call, own, rows)
    if off is not None and not math.isfinite(off):
        finite = own.isfinite().all(-1).flatten(0, 1).all(0).tolist()
        rows = [row for row in rows if finite[row]]
        off = context_difference(call, own, rows)
    if off is not None and not off <= _bound(call, own, rows):
        raise RuntimeError(
            f"{named(call)}: its edges cannot be cut: what met its values is no softmax of its "
            f"scores, or more than that made its context; recomputed, it differs by {off:.2g}"
        )


def _bound(call: Call, own: Tensor, rows: list[int]) -> float:
    """Give how far rounding can put a context from the one recomputed.

    Handwritten attention mixes by the weights that are seen; a kernel rounds scores as well.
    """
    own = own if len(rows) == own.shape[2] else own[:, :, rows]
    bound = rounding_bound(own)
    if isinstance(call, EagerCall):
        return bound
    return max(bound, _SLACK * torch.finfo(torch.float32).eps ** 0.5 * float(own.abs().max()))
