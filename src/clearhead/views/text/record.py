"""A record drawn on the terminal: one map, one row of it, and the table of all heads."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.cells import set_cell_size
from rich.color import Color
from rich.style import Style
from rich.table import Table
from rich.text import Text

from clearhead._core import value_error
from clearhead.views.figures import DrawnMap, chosen, colours, map_values
from clearhead.views.labels import label, many
from clearhead.views.shown import Shown
from clearhead.views.terminal import Terminal
from clearhead.views.text.maps import SHADES, shade

__all__ = ["render_record"]

# Cells a side of a map, the width of a label, and the sources that are listed.
CELLS, LABEL, SOURCES = 96, 10, 8


def render_record(
    shown: Shown,
    *,
    layer: int | None = None,
    head: int | None = None,
    sample: int = 0,
    at: int | None = None,
) -> None:
    """Draw one map, the row of query `at` (the last by default), and all heads."""
    console = Terminal()
    call, index = chosen(shown, layer, head, sample)
    heads = sum(len(x.heads) for x in shown.layers)
    console.print(Text.assemble((shown.title, "bold"), f": {many(len(shown.layers), 'call')}, "
                                f"{many(heads, 'head')}"))  # fmt: skip
    for note in shown.notes:
        console.print(Text(f"note: {note}", style="dim"))
    name = (
        f"head {call.layer}.{head}" if head is not None else f"layer {call.layer}, mean over heads"
    )
    size = f"{many(call.sizes.query, 'query', 'queries')} x {many(call.sizes.source, 'source')}"
    console.print(f"\nWho attends to whom ({name}; rows look at columns; {size})")
    labels = [_labels(shown, axis, sample) for axis in call.axes]
    room = max(1, console.width - LABEL - 2)
    values = map_values(call, sample, index, min(CELLS, room))
    names = _row_names(values, labels[0], call)
    console.print(_map(values, names, console.color_system is not None), soft_wrap=True)
    _explain(console, values)
    _row(console, call, index, sample, at, labels)
    _heads(console, shown, sample)


def _labels(shown: Shown, axis: int, sample: int) -> list[str] | None:
    lists = shown.axes[axis].labels
    return None if lists is None else lists[min(sample, len(lists) - 1)]


def _row_names(values: DrawnMap, labels: list[str] | None, call: Any) -> list[str]:
    offset = 0 if labels is None else len(labels) - call.sizes.query
    whole = labels is not None and len(values.rows) == (len(call.rows or range(call.sizes.query)))
    return [
        f"{row} {_short(labels[row + offset])}" if whole and labels else str(row)
        for row in values.rows.tolist()
    ]


def _short(text: str) -> str:
    shown = label(text.strip("\u2068\u2069")[:64])
    return shown if len(shown) <= LABEL else shown[: LABEL - 1] + "…"


def _scaled(values: DrawnMap) -> np.ndarray:
    """Weights as steps of the palette, by their square root; -1 is blocked, -2 is NaN."""
    largest = np.nanmax(np.where(values.allowed, values.weights, 0), initial=0) or 1.0
    steps = np.sqrt(np.clip(np.nan_to_num(values.weights) / largest, 0, 1)) * 255
    steps = np.where(np.isnan(values.weights), -2, steps.round())
    return np.where(values.allowed, steps, -1).astype(int)


def _map(values: DrawnMap, names: list[str], coloured: bool) -> Text:
    width = max(len(name) for name in names) if names else 0
    return _blocks(values, names, width) if coloured else _signs(values, names, width)


def _blocks(values: DrawnMap, names: list[str], width: int) -> Text:
    """Two rows a line: the upper half of a cell has the colour of one, the lower of the other."""
    steps, palette = _scaled(values), [_rgb(x) for x in colours(dark=True)]
    nan, text = _rgb(np.array([0.84, 0.37, 0])), Text(no_wrap=True)
    colour = {-1: None, -2: nan, **dict(enumerate(palette))}
    for row in range(0, len(steps), 2):
        text.append(set_cell_size(names[row], width) + " ", "dim")
        lower = steps[row + 1] if row + 1 < len(steps) else np.full(len(steps[row]), -1)
        for high, low in zip(steps[row].tolist(), lower.tolist(), strict=True):
            text.append(*_half(colour[high], colour[low]))
        text.append("\n")
    text.right_crop(1)
    return text


def _half(high: Color | None, low: Color | None) -> tuple[str, Style]:
    """One cell; a half without colour is blocked, and shows the ground of the terminal."""
    if high is None:
        return (" ", Style()) if low is None else ("▄", Style(color=low))
    return "▀", Style(color=high, bgcolor=low)


def _signs(values: DrawnMap, names: list[str], width: int) -> Text:
    """One sign a cell, where there are no colours."""
    text = Text(no_wrap=True)
    for row, name in enumerate(names):
        text.append(set_cell_size(name, width) + " ", "dim")
        for weight, allowed in zip(values.weights[row], values.allowed[row], strict=True):
            sign = next((sign for least, sign in SHADES if weight >= least), " ")
            text.append("?" if np.isnan(weight) else sign if allowed else "·")
        text.append("\n")
    text.right_crop(1)
    return text


def _rgb(colour: np.ndarray) -> Color:
    red, green, blue = (round(255 * float(x)) for x in colour)
    return Color.from_rgb(red, green, blue)


def _explain(console: Terminal, values: DrawnMap) -> None:
    largest = np.nanmax(np.where(values.allowed, values.weights, 0), initial=0)
    if console.color_system is not None:
        scale = Text("0 ")
        for colour in colours(dark=True, steps=16):
            scale.append("█", Style(color=_rgb(colour)))
        console.print(scale.append(f" {largest:.2f} (square root); nothing drawn: blocked", "dim"))
    else:
        signs = ", ".join(f"{sign} {least:.0%}" for least, sign in SHADES)
        console.print(f"from {signs}; · blocked")
    if values.words:
        console.print(Text(values.words, style="dim"))


def _row(
    console: Terminal, call: Any, index: int | None, sample: int, at: int | None, labels: list[Any]
) -> None:
    """List the sources of one query with the largest weights."""
    query, source = call.sizes[2:]
    at = query - 1 if at is None else at
    if not -query <= at < query:
        raise value_error("at", f"must be within 0..{query - 1}", got=at)
    row = _weights_of(call, index, sample, at % query)
    if row is None:
        return
    asker = "" if labels[0] is None else " " + _short(labels[0][at % query - query])
    console.print(Text(f"\nWhere query {at % query}{asker} looks"))
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 1))
    for place in np.argsort(-row, kind="stable")[:SOURCES].tolist():
        if row[place] > 0:
            name = "" if labels[1] is None else _short(labels[1][place - source])
            bar = Text("█" * round(float(row[place]) * 30), style="cyan")
            table.add_row(Text(str(place), style="dim"), Text(name, style="bold"),
                          f"{row[place]:.3f}", bar)  # fmt: skip
    console.print(table)


def _weights_of(call: Any, index: int | None, sample: int, at: int) -> np.ndarray | None:
    """The weights of one query, from the maps or the lists; None where only tiles were read."""
    if call.rows is not None and at not in call.rows:
        return None
    row = at if call.rows is None else call.rows.index(at)
    if call.weights is not None:
        found = call.weights[sample, :, row]
    elif call.top is not None:
        found = call.top.weights.new_zeros(call.sizes.head, call.sizes.source + 1).float().cpu()
        sources = call.top.sources[sample, :, row].cpu()
        sources = sources.where(sources >= 0, call.sizes.source).long()
        found = found.scatter(-1, sources, call.top.weights[sample, :, row].float().cpu())[:, :-1]
    else:
        return None
    return (found.mean(0) if index is None else found[index]).float().nan_to_num(0).numpy()


def _heads(console: Terminal, shown: Shown, sample: int) -> None:
    """A line for each head with its statistics."""
    content = shown.content()
    names = [statistic["label"] for statistic in content.header["statistics"]]
    if not names:
        return
    values = np.frombuffer(content.chunk("statistics"), "<f4")
    values = values.reshape(len(names), content.header["samples"], len(shown.layers), -1)
    console.print("\nEvery head, the mean over its rows")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("head", *names):
        table.add_column(name, justify="right")
    for entry, call in enumerate(shown.layers):
        for number, head in enumerate(call.heads):
            found = values[:, min(sample, values.shape[1] - 1), entry, number].tolist()
            cells = [Text(f"{x:.2f}", style="" if n == "entropy" else shade(x))
                     for n, x in zip(names, found, strict=True)]  # fmt: skip
            table.add_row(f"{call.layer}.{head}", *cells)
    console.print(table)
