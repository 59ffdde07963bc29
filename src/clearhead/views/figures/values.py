"""One map as an array, from whatever was read of it: all weights, lists, or tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead._core import value_error
from clearhead.readings import by_cell, cell_bounds

__all__ = ["DrawnMap", "chosen", "map_values", "shrunk"]

# Maps of more positions a side are drawn by tiles.
CELLS = 512


@dataclass(frozen=True)
class DrawnMap:
    """The weights of one head, or of the mean over heads, and what is known of each cell."""

    weights: np.ndarray  # (row, column)
    allowed: np.ndarray  # False where the mask blocks every edge of the cell
    held: np.ndarray  # False where nothing was read of the cell
    rows: np.ndarray  # the query of each row, or the first of the tile's
    columns: np.ndarray
    words: str  # what a cell is, where it is not the weight of one edge


def map_values(layer: Any, sample: int, head: int | None, cells: int = CELLS) -> DrawnMap:
    """Read one map of a `Shown`; `head` is an index into the layer's heads, None their mean."""
    query, source = layer.sizes[2:]
    rows = np.arange(query) if layer.rows is None else np.array(layer.rows, dtype=np.int64)
    words = []
    if layer.weights is not None:
        weights = _mean(layer.weights[sample], head)
        held = torch.ones(weights.shape, dtype=torch.bool)
    elif layer.blocks is not None and (layer.top is None or max(query, source) > cells):
        return _of_blocks(layer, sample, head)
    else:
        weights, held = _of_top(layer, sample, head)
        words.append(f"the {layer.top.weights.shape[-1]} largest weights of each row")
    allowed = _allowed(layer, sample, rows, min(cells, len(rows)), min(cells, source))
    if max(weights.shape) > cells:
        weights, held = shrunk(weights, cells), shrunk(held.float(), cells) > 0
        words.append("cells are tiles, by their largest weight")
    columns = cell_bounds(source, min(cells, source))[:-1]
    rows = rows[cell_bounds(len(rows), min(cells, len(rows)))[:-1]]
    held = (held | ~allowed).numpy()
    return DrawnMap(
        weights.numpy(), allowed.numpy(), held, rows, np.array(columns), "; ".join(words)
    )


def _mean(maps: Tensor, head: int | None) -> Tensor:
    return (maps.mean(0) if head is None else maps[head]).float()


def _of_top(layer: Any, sample: int, head: int | None) -> tuple[Tensor, Tensor]:
    """Lists as a map; what is in no list is not held, and counts as 0 in the mean."""
    weights, sources = (x[sample].cpu() for x in layer.top)
    full = torch.zeros(*weights.shape[:-1], layer.sizes.source + 1)
    at = torch.where(sources < 0, layer.sizes.source, sources).long()
    full.scatter_(-1, at, weights.float())
    held = torch.zeros(full.shape, dtype=torch.bool).scatter_(-1, at, True)[..., :-1]
    return _mean(full[..., :-1], head), held.any(0) if head is None else held[head]


def _of_blocks(layer: Any, sample: int, head: int | None) -> DrawnMap:
    query, source = layer.sizes[2:]
    weights = _mean(layer.blocks.max[sample].cpu(), head)
    high, wide = weights.shape
    rows = np.arange(query)
    allowed = _allowed(layer, sample, rows, high, wide).numpy()
    first, second = (np.array(cell_bounds(n, k)[:-1]) for n, k in ((query, high), (source, wide)))
    words = "cells are tiles, by their largest weight"
    return DrawnMap(weights.numpy(), allowed, np.ones(weights.shape, bool), first, second, words)


def _allowed(layer: Any, sample: int, rows: np.ndarray, high: int, wide: int) -> Tensor:
    """Whether the mask allows an edge of each cell, at most `high` by `wide` cells."""
    found = torch.ones(high, wide, dtype=torch.bool)
    if layer.mask is None:
        return found
    columns, bounds = torch.arange(layer.sizes.source), cell_bounds(len(rows), high)
    for row, (start, stop) in enumerate(pairwise(bounds)):
        tile = layer.mask.tile(torch.as_tensor(rows[start:stop]), columns, layer.sizes)
        if tile.ndim == 4:
            tile = tile[sample if tile.shape[0] > 1 else 0].any(0)
        found[row] = by_cell(tile.any(-2), wide, torch.any)
    return found


def shrunk(values: Tensor, cells: int) -> Tensor:
    """The largest value of each tile, at most `cells` a side; NaN where one is NaN."""
    return by_cell(by_cell(values, cells, torch.amax).mT, cells, torch.amax).mT


def chosen(shown: Any, layer: int | None, head: int | None, sample: int) -> tuple[Any, int | None]:
    """The call of a layer (the last by default), and the index of a head (None: their mean)."""
    calls = [x for x in shown.layers if layer is None or x.layer == layer]
    if not calls:
        _refuse("layer", layer, sorted({x.layer for x in shown.layers}))
    call = calls[-1]
    if head is not None and head not in call.heads:
        _refuse("head", head, call.heads)
    if not 0 <= sample < call.sizes.batch:
        _refuse("sample", sample, range(call.sizes.batch))
    return call, None if head is None else call.heads.index(head)


def _refuse(name: str, got: Any, known: Sequence[int]) -> None:
    numbers = ", ".join(map(str, known[:12])) + ", ..." * (len(known) > 12)
    raise value_error(name, f"is one of those that the record holds: {numbers}", got=got)
