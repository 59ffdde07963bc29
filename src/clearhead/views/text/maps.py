"""Who attends to whom, as a map on the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from clearhead.views.look import MAP_LIMIT
from clearhead.views.terminal import Terminal

__all__ = ["shade", "show_map"]

# Up to so many tokens the map of weights is in numbers, if the terminal is wide enough.
NUMBERS = 16
# What a cell of a longer text says: the least weight, and its sign.
SHADES = ((0.5, "█"), (0.25, "▓"), (0.1, "▒"), (0.02, "░"))


def show_map(seen: dict[str, Any], console: Terminal, which: str) -> None:
    """Draw who attends to whom: in numbers, in shades, or say why not."""
    size, room = len(seen["tokens"]), console.width
    if seen["map"] is None:
        console.print(
            f"\nWho attends to whom: left out, {size} tokens where up to {MAP_LIMIT} are shown"
        )
        return
    title = f"\nWho attends to whom ({which}; rows look at columns, "
    numbers = _numbers(seen)
    if size <= NUMBERS and console.measure(numbers).maximum <= room:
        console.print(f"{title}in %)")
        console.print(numbers)
        return
    label = max(len(str(size - 1)) + 1 + Text(t["label"]).cell_len for t in seen["tokens"])
    wide = next((cell for cell in (2, 1) if label + 1 + size * cell <= room), None)
    if wide is None:
        console.print(f"\nWho attends to whom: left out, {size} tokens need a wider terminal")
        return
    console.print(f"{title}in shades)")
    console.print(_shades(seen, label, wide))
    legend = ", ".join(f"{sign} {least:.0%}" for least, sign in SHADES)
    console.print(f"from {legend}; · blocked", style="dim")


def _numbers(seen: dict[str, Any]) -> Table:
    names = [token["label"] for token in seen["tokens"]]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", style="dim", justify="right", no_wrap=True)
    for name in names:
        table.add_column(Text(name), justify="right", no_wrap=True)
    rows = zip(names, seen["map"]["weights"], seen["map"]["allowed"], strict=True)
    for position, (name, weights, allowed) in enumerate(rows):
        cells = [
            Text(f"{100 * weight:.0f}", style=shade(weight)) if may else Text("·", style="dim")
            for weight, may in zip(weights, allowed, strict=True)
        ]
        table.add_row(Text(name, style="bold" if position == seen["at"] else ""), *cells)
    return table


def _shades(seen: dict[str, Any], label: int, wide: int) -> Text:
    """One sign a cell, under the characters of the sources where each has one."""
    tokens, lines = seen["tokens"], Text(no_wrap=True)
    if all(Text(token["label"]).cell_len == 1 for token in tokens):
        gap = " " * (wide - 1)
        lines.append(" " * (label + 1) + gap.join(t["label"] for t in tokens) + "\n", "dim")
    rows = zip(tokens, seen["map"]["weights"], seen["map"]["allowed"], strict=True)
    for token, weights, allowed in rows:
        name = f"{token['position']} {token['label']}"
        style = "bold" if token["position"] == seen["at"] else "dim"
        lines.append(" " * (label - Text(name).cell_len) + name + " ", style)
        for weight, may in zip(weights, allowed, strict=True):
            sign = next((sign for least, sign in SHADES if weight >= least), " ")
            lines.append((sign if may else "·").ljust(wide), "cyan" if may else "dim")
        lines.append("\n")
    lines.right_crop(1)
    return lines


def shade(weight: float) -> str:
    """Style a weight by its size."""
    return "bold cyan" if weight >= 0.5 else "cyan" if weight >= 0.2 else ""
