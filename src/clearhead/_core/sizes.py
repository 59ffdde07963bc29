"""How many positions an attention call has: one order everywhere."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sizes"]


class Sizes(NamedTuple):
    """How many positions a mask is asked about. `batch` and `head` matter to masks that vary."""

    query: int
    source: int
    batch: int = 1
    head: int = 1
