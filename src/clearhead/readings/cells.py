"""How positions are split into the cells of a block map: as torch.tensor_split splits them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead._core import is_number, type_error, value_error

__all__ = ["by_cell", "cell_bounds", "positive"]


def cell_bounds(size: int, cells: int) -> list[int]:
    """Where each cell begins, and where the last one ends.

    >>> cell_bounds(7, 3)
    [0, 3, 5, 7]
    """
    cells = min(cells, size)
    width, longer = divmod(size, max(cells, 1))
    return [i * width + min(i, longer) for i in range(cells + 1)]


def by_cell(x: Tensor, cells: int, how: Callable[..., Tensor]) -> Tensor:
    """Reduce the last axis cell by cell, split as torch.tensor_split splits it."""
    size = x.shape[-1]
    cells = min(cells, size)
    width, longer = divmod(size, max(cells, 1))
    cut = longer * (width + 1)
    parts = []
    if longer:
        parts.append(how(x[..., :cut].unflatten(-1, (longer, width + 1)), -1))
    if cells > longer:
        parts.append(how(x[..., cut:].unflatten(-1, (cells - longer, width)), -1))
    return torch.cat(parts, -1) if parts else x


def positive(name: str, value: int) -> int:
    """Check a count that is at least 1."""
    if not is_number(value):
        raise type_error(name, "takes an integer", got=repr(value))
    if value < 1:
        raise value_error(name, "is at least 1", got=value)
    return int(value)
