"""What `look` gathered, drawn on the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from clearhead.cli.arguments import many
from clearhead.views import difference
from clearhead.views.terminal import Terminal

# Up to so many tokens the map of weights is in numbers, if the terminal is wide enough.
NUMBERS = 16
# What a cell of a longer text says: the least weight, and its sign.
SHADES = ((0.5, "█"), (0.25, "▓"), (0.1, "▒"), (0.02, "░"))


def render(seen: dict[str, Any]) -> None:
    """Draw all of it, part by part."""
    console = Terminal()
    console.print(_headline(seen))
    console.print(_strip(seen))
    for note in seen["notes"]:
        console.print(Text(f"note: {note}", style="dim"))
    asker = Text.assemble(f"position {seen['at']} ", (seen["tokens"][seen["at"]]["label"], "bold"))
    _show_predictions(seen, console, asker)
    if seen["sources"] is None:
        _show_influence(seen, console, asker)
        return
    heads = len([entry for entry in seen["heads"] if entry["layer"] == seen["layer"]])
    which = f"mean over {heads} heads" if seen["head"] is None else f"head {seen['head']}"
    if heads == 1 and seen["head"] is None:
        which = "its one head"
    which = f"layer {seen['layer']}, {which}"
    console.print(Text.assemble("\nWhere ", asker, f" looks ({which})"))
    console.print(_bars(seen["sources"], "weight", console.width))
    if seen["difference"]:
        difference.render(seen, console)
    _show_map(seen, console, which)
    console.print(Text.assemble("\nEvery head, at ", asker))
    console.print(_table(seen))
    console.print(
        "Weights say where a head looks, not what made the difference: "
        "a useful intuition, not a guarantee.",
        style="dim",
    )


def _headline(seen: dict[str, Any]) -> Text:
    name = (seen["model"], "bold")
    if not seen["heads"]:
        return Text.assemble(name, ": an RNN, without attention")
    layers, heads = 1 + max(entry["layer"] for entry in seen["heads"]), len(seen["heads"])
    return Text.assemble(
        name, f": {many(layers, 'layer')}, {many(heads, 'head')}" + " in all" * (layers > 1)
    )


def _strip(seen: dict[str, Any]) -> Text:
    strip = Text()
    for token in seen["tokens"]:
        chosen = token["position"] == seen["at"]
        strip.append(token["label"], style="bold reverse" if chosen else "")
        strip.append(" ")
    return strip


def _show_predictions(seen: dict[str, Any], console: Terminal, asker: Text) -> None:
    if seen["predictions"] is None:
        console.print("\nThis model has no head that predicts tokens; it is only watched.")
        return
    verb = "What stands at" if seen["masked"] else "What comes after"
    console.print(Text.assemble("\n", verb, " ", asker, "?"))
    console.print(_bars(seen["predictions"], "probability", console.width))


def _show_influence(seen: dict[str, Any], console: Terminal, asker: Text) -> None:
    console.print(Text.assemble("\nHow strongly the answer at ", asker, " hangs on each token"))
    console.print(_bars(seen["influence"], "influence", console.width))
    console.print(
        "An RNN has no attention, and so no weights to show: it carries one state along. This is "
        "the size of the derivative of its answer by each token (influence() in the library); the "
        "longest bar is the largest.",
        style="dim",
    )


def _bars(entries: list[dict[str, Any]], key: str, width: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 1))
    room = max(8, min(40, width - 34))
    # Shares are drawn as parts of 1, anything else as parts of the largest.
    largest = max((entry[key] for entry in entries), default=1.0) if key == "influence" else 1.0
    for entry in entries:
        cells = [
            Text(entry["label"], style="bold", no_wrap=True),
            Text(f"{entry[key]:.3f}", no_wrap=True, justify="right"),
            _bar(entry[key] / largest, room),
        ]
        if "position" in entry:
            cells.insert(0, Text(str(entry["position"]), justify="right", style="dim"))
        table.add_row(*cells)
    return table


def _bar(share: float, room: int) -> Text:
    eighths = round(share * room * 8)
    partial = " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return Text("█" * (eighths // 8) + partial, style="cyan", no_wrap=True)


def _show_map(seen: dict[str, Any], console: Terminal, which: str) -> None:
    """Draw who attends to whom: in numbers, in shades, or say why not."""
    size, room = len(seen["tokens"]), console.width
    if seen["map"] is None:
        from clearhead.cli.look import MAP_LIMIT

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
            Text(f"{100 * weight:.0f}", style=_shade(weight)) if may else Text("·", style="dim")
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


def _shade(weight: float) -> str:
    return "bold cyan" if weight >= 0.5 else "cyan" if weight >= 0.2 else ""


def _table(seen: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("layer", "head", "strongest", "entropy", "self", "previous", "first"):
        left = name == "strongest"
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for entry in seen["heads"]:
        best = entry["strongest"]
        source = Text.assemble(
            (f"{best['position']:>3} ", "dim"), (best["label"], "bold"), f" {best['weight']:.2f}"
        )
        numbers = [
            Text(f"{entry[name]:.2f}", style=_shade(entry[name]) if name != "entropy" else "")
            for name in ("entropy", "self", "previous", "first")
        ]
        table.add_row(str(entry["layer"]), str(entry["head"]), source, *numbers)
    return table
