"""Products of weights and values: which axes hold the queries, the sources and the features."""

from __future__ import annotations

from clearhead._capture.products.axes import Axes, ValueProduct, axes_of
from clearhead._capture.products.description import described
from clearhead._capture.products.unfollowed import (
    NO_SCORES,
    is_by_position,
    mixing_reason,
    sums_positions,
)

__all__ = [
    "NO_SCORES",
    "Axes",
    "ValueProduct",
    "axes_of",
    "described",
    "is_by_position",
    "mixing_reason",
    "sums_positions",
]
