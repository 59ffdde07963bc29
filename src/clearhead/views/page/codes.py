"""How the page's chunks are written: weights as codes of their logarithm, lists, blocks, runs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from clearhead._core import Sizes
from clearhead.masks import EdgeSet

__all__ = ["COARSELY", "blocks", "log_codes", "mask_runs", "row_sums", "top_planes", "top_values"]

# Steps an octave: a code is off by at most half a step, 2.2% and 9.1%.
FINE, COARSE = 16, 4
# Weights below this are folded into the remainder of a coarse list.
LEAST = 2.0**-8
COARSELY = "Weights are held to 9.1%; those below 1/256 are part of the remainder."


def log_codes(weights: Tensor, steps: int = FINE) -> bytes:
    """Write one byte a weight: 0 is zero, 255 is NaN, code c is 2 ** (-(c - 1) / steps)."""
    codes = (1 - steps * weights.clamp(min=1e-30).log2()).round().clamp(1, 254)
    codes = torch.where(weights > 0, codes, 0)
    return torch.where(weights.isnan(), 255, codes).to(torch.uint8).numpy().tobytes()


def top_values(weights: Tensor, sources: Tensor, source: int, encoding: str = "f16") -> bytes:
    """Write the sources (row, k), all ones for none, then their weights as "f16" or "f32"."""
    ids = sources.numpy().astype(np.int64).astype("<u4" if source > 0xFFFF else "<u2")
    return ids.tobytes() + weights.numpy().astype("<f2" if encoding == "f16" else "<f4").tobytes()


def top_planes(weights: Tensor, sources: Tensor, source: int) -> bytes:
    """Write the sources in ascending order as first differences, in planes of bytes; then codes.

    Each plane is (k, row), which deflates to about half of what pairs take.
    """
    sources = torch.where(weights >= LEAST, sources, -1)
    order = (
        torch.where(sources < 0, torch.iinfo(torch.int64).max, sources)
        .sort(dim=-1, stable=True)
        .indices
    )
    sources, weights = sources.gather(-1, order), weights.gather(-1, order)
    known = sources.clamp(min=0).cummax(-1).values
    steps = known.diff(dim=-1, prepend=torch.zeros_like(known[:, :1])).T.numpy()
    wide = 4 if source > 0xFFFF else 2
    planes = b"".join(((steps >> 8 * at) & 255).astype(np.uint8).tobytes() for at in range(wide))
    return planes + log_codes(torch.where(sources < 0, 0, weights).T.contiguous(), COARSE)


def blocks(mean: Tensor, largest: Tensor) -> bytes:
    """Write the mean and the largest weight of each tile."""
    return log_codes(mean.contiguous()) + log_codes(largest.contiguous())


def row_sums(sums: Tensor) -> bytes:
    """Write the sum of each row, to four places: it is 1, or less with sink logits."""
    return np.round(sums.double().numpy(), 4).astype("<f4").tobytes()


def mask_runs(mask: EdgeSet, sizes: Sizes, sample: int) -> bytes:
    """Write the allowed runs of each row: their number, then start and stop of each."""
    query, source = sizes.query, sizes.source
    found = []
    step = max(1, (1 << 22) // max(source, 1))
    columns = torch.arange(source)
    for start in range(0, query, step):
        rows = torch.arange(start, min(start + step, query))
        tile = mask.tile(rows, columns, sizes)
        if tile.ndim == 4:
            # Of a mask that differs by head, the edges that any head has.
            tile = tile[sample if tile.shape[0] > 1 else 0].any(0)
        edges = torch.nn.functional.pad(tile.to(torch.int8), (1, 1)).diff(dim=-1).numpy()
        for row in edges:
            at = np.flatnonzero(row)
            found.append(np.concatenate([[len(at) // 2], at]))
    return np.concatenate(found).astype("<u4").tobytes() if found else b""
