"""How many positions an attention call has: one order everywhere."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sizes"]


class Sizes(NamedTuple):
    """The axes of one attention call. Masks that vary over samples or heads need all four."""

    batch: int
    head: int
    query: int
    source: int
