"""What `look` gathered, drawn on the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from clearhead.views.labels import many
from clearhead.views.terminal import Terminal
from clearhead.views.text.difference import render_difference, render_without
from clearhead.views.text.maps import shade, show_map

__all__ = ["render_look"]


def render_look(seen: dict[str, Any]) -> None:
    """Draw all of it, part by part."""
    console = Terminal()
    console.print(_headline(seen))
    console.print(_strip(seen))
    for note in seen["notes"]:
        console.print(Text(f"note: {note}", style="dim"))
    asker = Text.assemble(f"position {seen['at']} ", (seen["tokens"][seen["at"]]["label"], "bold"))
    _show_predictions(seen, console, asker)
    if seen["without"]:
        render_without(seen, console, asker)
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
        render_difference(seen, console)
    show_map(seen, console, which)
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
            Text(f"{entry[name]:.2f}", style=shade(entry[name]) if name != "entropy" else "")
            for name in ("entropy", "self", "previous", "first")
        ]
        table.add_row(str(entry["layer"]), str(entry["head"]), source, *numbers)
    return table
