"""All heads: small maps, a row for each call and a column for each head."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.patches import Patch

from clearhead.views.figures.maps import norm_of
from clearhead.views.figures.style import NAN, PaperFigure, in_lines, palette
from clearhead.views.figures.values import map_values

__all__ = ["draw_heads"]

# Cells a side of one small map, and between two.
CELLS, GAP = 48, 5
GROUND, BLOCKED = (1.0, 1.0, 1.0), (0.86, 0.86, 0.86)
# Up to so many maps each bears its name.
NAMED = 160


def draw_heads(
    shown: Any, *, layer: int | None, sample: int, scale: str, title: str | None, **_: Any
) -> PaperFigure:
    """Draw the maps, each by its own largest weight, blocked cells in grey."""
    calls = [x for x in shown.layers if layer is None or x.layer == layer]
    numbers = sorted({head for call in calls for head in call.heads})
    step = CELLS + GAP
    canvas = np.ones((len(calls) * step, len(numbers) * step, 3))
    for row, call in enumerate(calls):
        for index, head in enumerate(call.heads):
            top, left = row * step, numbers.index(head) * step
            canvas[top : top + CELLS, left : left + CELLS] = _thumb(call, sample, index, scale)
    return _placed(canvas, calls, numbers, title)


def _thumb(call: Any, sample: int, index: int, scale: str) -> np.ndarray:
    """One map as colours, (CELLS, CELLS, 3)."""
    values = map_values(call, min(sample, call.sizes.batch - 1), index, CELLS)
    drawn = np.ma.masked_invalid(values.weights)
    colours = palette()(norm_of(drawn, scale)(drawn.filled(0)))[..., :3]
    colours[~values.allowed] = BLOCKED
    colours[np.isnan(values.weights) & values.allowed] = _rgb(NAN)
    high, wide = values.weights.shape
    rows, columns = (np.arange(CELLS) * n // CELLS for n in (high, wide))
    return colours[rows][:, columns]


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))


def _placed(
    canvas: np.ndarray, calls: list[Any], numbers: list[int], title: str | None
) -> PaperFigure:
    named = len(calls) * len(numbers) <= NAMED
    inch = 0.7 if named else max(0.18, min(0.5, 7.5 / max(len(numbers), len(calls) / 1.3)))
    size = (max(2.4, len(numbers) * inch + 0.8), max(1.6, len(calls) * inch + 0.9))
    made = PaperFigure(figsize=size, layout="compressed")
    axes = made.add_subplot()
    axes.imshow(canvas, interpolation="nearest" if named else "antialiased")
    axes.spines[:].set_visible(False)
    step = CELLS + GAP
    middle = (CELLS - 1) / 2
    every = max(1, len(calls) // 30)
    names = [f"{x.layer}" + (f" call {x.call}" if x.call else "") for x in calls]
    axes.set_yticks([at * step + middle for at in range(0, len(calls), every)], names[::every])
    axes.set_xticks([at * step + middle for at in range(len(numbers))], [str(n) for n in numbers])
    axes.tick_params(length=0)
    axes.set_ylabel("layer")
    axes.set_xlabel("head")
    if named:
        _name_all(axes, calls, numbers)
    axes.set_title(in_lines(title or _title(calls), 60))
    if any(call.mask is not None for call in calls):
        parts = [Patch(facecolor=BLOCKED, label="blocked by the mask")]
        made.legend(handles=parts, loc="outside lower left", frameon=False, fontsize=7)
    return made


def _name_all(axes: Any, calls: list[Any], numbers: list[int]) -> None:
    step = CELLS + GAP
    for row, call in enumerate(calls):
        for head in call.heads:
            at = (numbers.index(head) * step + CELLS - 2, row * step + 2)
            axes.text(*at, f"{call.layer}.{head}", fontsize=5.5, ha="right", va="top")


def _title(calls: list[Any]) -> str:
    """What the small maps are."""
    heads = sum(len(call.heads) for call in calls)
    return f"{heads} heads; rows are queries, columns are sources"
