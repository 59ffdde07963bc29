"""The proof that a captured call is what a cut assumes, on every row that the cut touches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead._capture import Call, EagerCall, context_difference, softmax_difference
from clearhead.intervention.cuts import Cut

__all__ = ["named", "prove", "prove_place"]

# Rows of a kernel's context that are recomputed, and a factor on the tolerance of a context.
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
    size = own.abs().nan_to_num(0.0).amax().item() if own.numel() else 0.0
    if off is not None and off > _SLACK * torch.finfo(own.dtype).eps ** 0.5 * (1 + size):
        raise RuntimeError(
            f"{named(call)}: its edges cannot be cut: what met its values is no softmax of its "
            f"scores, or more than that made its context; recomputed, it differs by {off:.2g}"
        )
