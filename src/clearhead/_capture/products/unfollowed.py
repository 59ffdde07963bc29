"""Attention of forms that are not followed: how it is told from other products, and the reason."""

from __future__ import annotations

from torch import Tensor

from clearhead._capture.provenance import Origin

__all__ = ["NO_SCORES", "is_by_position", "mixing_reason", "sums_positions"]

_FOREIGN = (
    "the scores of its softmax are of no product that torch shows: "
    "they are given, or made in TorchScript or a compiled extension"
)
NO_SCORES = "the scores of its softmax are of no product of two activations that is followed"
_UNDIVIDED = "its exponential of scores meets a value before it is divided by its sum"
_NO_SOFTMAX = (
    "it mixes positions by a product of two activations that meets a third "
    "without a softmax that is followed"
)
_NO_WEIGHTS = (
    "it mixes positions by weights that no function of torch shows: "
    "constants, or made in a function with a backward of its own"
)


def mixing_reason(
    origin: Origin | None, operand: Tensor, at: int, known: bool, positions: set[int]
) -> str | None:
    """Say why a product is attention that is not seen, if its operand `at` makes it that.

    `known` tells whether the other operand descends from what the model was given.
    """
    if origin is not None and origin.softmax is not None:
        return None
    if at == 0 and origin is not None and origin.opaque:
        if origin.foreign:
            return _FOREIGN
        return NO_SCORES if known and is_by_position(operand, positions) else None
    if at == 0 and origin is not None and origin.exp is not None:
        return _UNDIVIDED
    if origin is not None and origin.product is not None:
        return _NO_SOFTMAX if known and origin.mixes else None
    if at == 0 and known and (origin is None or origin.foreign):
        return _NO_WEIGHTS if is_by_position(operand, positions) else None
    return None


def is_by_position(x: Tensor, positions: set[int]) -> bool:
    """Whether the last two axes of a tensor may both be positions."""
    return x.ndim > 1 and {*x.shape[-2:]} <= positions


def sums_positions(left: Tensor, right: Tensor, out: Tensor, positions: set[int]) -> bool:
    """Whether a product may sum over the positions, as linear attention does first."""
    return bool(({*left.shape} & {*right.shape} & positions) - {*out.shape})
