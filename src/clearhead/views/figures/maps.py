"""One map: weights, or the mask."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap, LogNorm, Normalize, PowerNorm
from matplotlib.patches import Patch

from clearhead.masks import Mask, default_sizes, everything
from clearhead.views.figures.style import BLOCKED, NAN, PaperFigure, in_lines, palette, token
from clearhead.views.figures.values import DrawnMap, chosen, map_values
from clearhead.views.page.axes import is_pair

__all__ = ["draw_map", "draw_mask", "norm_of"]

# Up to so many positions each has its label.
LABELLED = 64
NOT_HELD = ListedColormap(["#ececec"])
ALLOWED = ListedColormap(["#0072b2"])
# Positions of a mask that are drawn one by one.
CELLS = 128


def draw_map(
    shown: Any, *, layer: int | None, head: int | None, sample: int, scale: str,
    title: str | None, **_: Any,
) -> PaperFigure:  # fmt: skip
    """Draw the weights of one head, or their mean."""
    call, index = chosen(shown, layer, head, sample)
    values = map_values(call, sample, index)
    labels = _labels(shown, call, values, sample)
    made, axes = _canvas(values, labels)
    _hatch(axes)
    _plane(axes, ~values.held, NOT_HELD)
    broken = np.isnan(values.weights) & values.allowed
    hidden = ~(values.allowed & values.held) | broken
    drawn = np.ma.MaskedArray(values.weights, hidden)
    image = axes.imshow(drawn, cmap=palette(), norm=norm_of(drawn, scale), **_FILL)
    _plane(axes, broken, ListedColormap([NAN]))
    _colorbar(made, axes, image)
    name = (
        f"head {call.layer}.{head}" if head is not None else f"layer {call.layer}, mean over heads"
    )
    if len(call.heads) == 1:
        name = f"head {call.layer}.{call.heads[0]}"
    axes.set_title(in_lines(title or name, 48))
    _legend(axes, values, broken, values.words)
    return made


def draw_mask(
    shown: Any, *, layer: int | None, head: int | None, sample: int, title: str | None,
    tokens: Any = None, **_: Any,
) -> PaperFigure:  # fmt: skip
    """Draw which query may attend to which source, by the share of edges in each tile."""
    if isinstance(shown, Mask):
        labels, name = _given(tokens), repr(shown)
        query, source = (
            own if given is None else len(given)
            for own, given in zip(default_sizes(shown), labels, strict=True)
        )
        values = _shares(shown, query, source, sample, head)
        labels = tuple(x if max(query, source) <= LABELLED else None for x in labels)
    else:
        call, _index = chosen(shown, layer, None, sample)
        values = _shares(call.mask, call.sizes.query, call.sizes.source, sample, head)
        labels, name = _labels(shown, call, values, sample), f"layer {call.layer}: {call.mask!r}"
        if call.mask is None:
            name = f"layer {call.layer}: every query may attend to every source"
    made, axes = _canvas(values, labels, bar=False)
    _hatch(axes)
    shares = values.weights
    drawn = np.ma.MaskedArray(shares, shares == 0)
    axes.imshow(drawn, cmap=ALLOWED, alpha=0.35 + 0.65 * shares, **_FILL)
    axes.set_title(in_lines(title or name, 48))
    parts = [Patch(facecolor="#0072b2", label="may attend"), _blocked()]
    if ((shares > 0) & (shares < 1)).any():
        parts.insert(1, Patch(facecolor="#0072b2", alpha=0.5, label="some edges of the tile"))
    _place(axes, parts)
    return made


def _shares(mask: Mask | None, query: int, source: int, sample: int, head: int | None) -> DrawnMap:
    """The share of edges in each tile of a mask; None is a mask that allows everything."""
    if mask is None:
        mask = everything()
    (found,) = mask.maps(query, source, cells=CELLS, sample=sample, head=head or 0)
    shares = np.array(found.shares).reshape(len(found.rows) - 1, len(found.columns) - 1)
    rows, columns = np.array(found.rows[:-1]), np.array(found.columns[:-1])
    return DrawnMap(shares, shares > 0, np.ones(shares.shape, bool), rows, columns, "")


_FILL: dict[str, Any] = {"interpolation": "nearest", "aspect": "equal"}


def norm_of(drawn: Any, scale: str) -> Normalize:
    """The scale of colours, from 0 (or for "log" the least weight) to the largest weight."""
    known = np.ma.masked_invalid(drawn).compressed()
    largest = float(known.max()) if known.size and known.max() > 0 else 1.0
    if scale == "log":
        positive = known[known > 0]
        least = float(positive.min()) if positive.size else largest / 10
        return LogNorm(max(least, largest * 1e-6, 1e-30), max(largest, 1.001 * least), clip=True)
    return PowerNorm(0.5 if scale == "sqrt" else 1.0, 0, largest)


def _canvas(values: DrawnMap, labels: tuple[Any, ...], bar: bool = True) -> tuple[Any, Any]:
    """A figure whose cells are square and whose labels can be read."""
    high, wide = values.weights.shape
    least = 0.11 if any(x is not None for x in labels) else 0.0
    cell = float(np.clip(3.2 / max(high, wide), least, 0.3))
    size = float(np.clip(72 * cell * 0.75, 5, 8))
    inches = [max(1.0, min(n * cell, 7.5)) for n in (wide, high)]
    texts = [None if x is None else [token(each) for each in x] for x in labels]
    room = [0.3 if x is None else max(map(len, x), default=0) * size * 0.65 / 72 for x in texts]
    figsize = (inches[0] + room[0] + 0.5 + 0.7 * bar, inches[1] + room[1] + 1.0)
    made = PaperFigure(figsize=figsize, layout="compressed")
    axes = made.add_subplot()
    axes.spines[["top", "right"]].set_visible(True)
    axes.set_xlabel("source")
    axes.set_ylabel("query")
    _ticks(axes.yaxis, values.rows, texts[0], size)
    _ticks(axes.xaxis, values.columns, texts[1], size)
    if texts[1] is not None and max(map(len, texts[1]), default=0) > 1:
        axes.xaxis.set_tick_params(rotation=90)
    return made, axes


def _ticks(axis: Any, positions: np.ndarray, labels: list[str] | None, size: float) -> None:
    """Labels of all positions, or round numbers of some."""
    if labels is not None:
        axis.set_ticks(range(len(positions)), labels, fontsize=size)
        axis.set_tick_params(length=0)
        return
    last = int(positions[-1]) if len(positions) else 0
    step = next(n * 10**e for e in range(10) for n in (1, 2, 5) if last / (n * 10**e) < 8)
    numbers = np.arange(0, last + 1, step)
    axis.set_ticks(np.interp(numbers, positions, np.arange(len(positions))), map(str, numbers))


def _labels(shown: Any, call: Any, values: DrawnMap, sample: int) -> tuple[Any, Any]:
    """The labels of the rows and columns of a map, None where positions have numbers."""
    found = []
    held = call.sizes.query if call.rows is None else len(call.rows)
    for axis, positions, size, single in (
        (call.axes[0], values.rows, call.sizes.query, held),
        (call.axes[1], values.columns, call.sizes.source, call.sizes.source),
    ):
        lists = shown.axes[axis].labels
        own = None if lists is None else lists[min(sample, len(lists) - 1)]
        # Queries that are fewer than the sources are the last ones. Tiles have no labels.
        fits = own is not None and len(positions) == single <= LABELLED
        found.append(own[len(own) - size :] if own is not None and fits else None)
    return found[0], found[1]


def _given(tokens: Any) -> tuple[Any, ...]:
    """Labels of a mask's queries and sources: one list for both, or a pair."""
    query, source = tokens if is_pair(tokens) else (tokens, tokens)
    return tuple(None if x is None else [str(each) for each in x] for x in (query, source))


def _hatch(axes: Any) -> None:
    """The ground of a map: hatched, as far as nothing is drawn on it."""
    axes.patch.set(facecolor="white", edgecolor=BLOCKED, hatch="//////", linewidth=0)


def _plane(axes: Any, cells: np.ndarray, colours: ListedColormap) -> None:
    """Fill some cells with one colour."""
    if cells.any():
        axes.imshow(np.ma.MaskedArray(cells.astype(float), ~cells), cmap=colours, **_FILL)


def _colorbar(made: Any, axes: Any, image: Any) -> None:
    bar = made.colorbar(image, ax=axes, shrink=0.8, aspect=18, pad=0.02, label="weight")
    bar.outline.set_linewidth(0.4)


def _blocked() -> Patch:
    return Patch(facecolor="white", edgecolor=BLOCKED, hatch="//////", linewidth=0.4,
                 label="blocked by the mask")  # fmt: skip


def _legend(axes: Any, values: DrawnMap, broken: np.ndarray, words: str) -> None:
    parts = [] if values.allowed.all() else [_blocked()]
    if not values.held.all():
        parts.append(Patch(facecolor="#ececec", label="not read"))
    if broken.any():
        parts.append(Patch(facecolor=NAN, label="NaN"))
    if words:
        parts.append(Patch(alpha=0, label=words))
    _place(axes, parts)


def _place(axes: Any, parts: list[Patch]) -> None:
    if parts:
        axes.figure.legend(handles=parts, loc="outside lower left", frameon=False, fontsize=7)
