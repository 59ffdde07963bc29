"""Which weights dropout keeps: a function of the seed and the edge alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from clearhead._core import Sizes
from clearhead.attention.problem import Corner

__all__ = ["bounds", "draw_seed", "keep"]

# The constants of SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit numbers.
STEP = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)


def draw_seed(device: torch.device) -> Tensor:
    """Draw the one seed of a call from torch's default generator."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)


def keep(
    seed: Tensor, p: float, lead: Sequence[int], rows: Tensor, columns: Tensor, sizes: Sizes,
    corner: Corner | None = None,
) -> Tensor:  # fmt: skip
    """Return (*lead, rows, columns): True where a weight is kept, with probability 1 - p.

    `lead` is (*batch, head). An edge has the same result in every tile: its number in the whole
    map, ((lead * query) + row) * source + column, is hashed with the seed.
    """
    *batch, heads = lead
    head, query, source, sizes = corner or Corner(0, 0, 0, sizes._replace(head=heads))
    index = torch.arange(prod(batch) * sizes.head, device=rows.device)
    index = index.reshape(*batch, sizes.head, 1, 1).narrow(-3, head, heads)
    rows, columns = rows + query, columns + source
    edge = (index * sizes.query + rows[:, None]) * sizes.source + columns
    return (_shift(_mix(seed + edge * STEP), 11)) >= _least(p)


def bounds(seed: Tensor, p: float) -> tuple[int, int, float]:
    """Return the seed, the least hash that is kept, and the factor of a kept weight."""
    return int(seed), _least(p), 1 / (1 - p) if p < 1 else 0.0


def _least(p: float) -> int:
    return round(p * 2.0**53)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * FIRST
    x = (x ^ _shift(x, 27)) * SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right as if unsigned: int64 is the widest type of every device."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
