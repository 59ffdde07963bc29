"""The part of `look` about knock-outs, drawn on the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from clearhead.views.terminal import Terminal

__all__ = ["render_difference", "render_without"]


def render_difference(seen: dict[str, Any], console: Terminal) -> None:
    """Draw the part."""
    found = seen["difference"]
    best = seen["predictions"][0]["label"]
    console.print(
        Text.assemble(
            "\nWhat difference does it make? The probability of ", (best, "bold"),
            f" when position {seen['at']} cannot read one source, in {found['where']}"
            f" (without a cut: {found['probability']:.3f})",
        )
    )  # fmt: skip
    table = Table(box=None, padding=(0, 2, 0, 1), header_style="dim")
    over = found["mean_over"].replace(", ", ",\n")
    for name in ("", "source", over, "probability", "change"):
        table.add_column(name, justify="left" if name == "source" else "right", no_wrap=True)
    for row in found["sources"]:
        table.add_row(
            Text(str(row["position"]), style="dim"),
            Text(row["label"], style="bold"),
            f"{row['weight']:.3f}",
            f"{row['probability']:.3f}",
            _change(row["change"]),
        )
    console.print(table)
    console.print(_verdict(found, len(seen["tokens"])))


def render_without(seen: dict[str, Any], console: Terminal, asker: Text) -> None:
    """Draw the predictions with and without the heads that were ablated."""
    found = seen["without"]
    names = ", ".join(f"{layer}.{head}" for layer, head in found["heads"])
    which = f"head {names}" if len(found["heads"]) == 1 else f"heads {names}"
    console.print(Text.assemble("\nWhat changes at ", asker, f" without {which}?"))
    table = Table(box=None, padding=(0, 2, 0, 1), header_style="dim")
    for name in ("prediction", "probability", "without", "change"):
        table.add_column(name, justify="left" if name == "prediction" else "right", no_wrap=True)
    for row in found["predictions"]:
        numbers = (f"{row['probability']:.3f}", f"{row['without']:.3f}")
        table.add_row(Text(row["label"], style="bold"), *numbers, _change(row["change"]))
    console.print(table)
    if found["note"]:
        console.print(f"note: {found['note']}", style="dim")


def _change(change: float) -> Text:
    style = "bold red" if change < -0.05 else "bold green" if change > 0.05 else ""
    return Text(f"{change:+.3f}", style=style)


def _verdict(found: dict[str, Any], tokens: int) -> str:
    """Say how good a guide the weights were, and over how many sources that was found."""
    words, tried = found["words"], found["compared"]
    words = words[0].upper() + words[1:]
    if "rank correlation" not in words:
        return f"{words}."
    over = f"{tried} of the {tokens} tokens" if tried < tokens else f"all {tokens} tokens"
    if len(found["sources"]) < tried:
        over += f" ({len(found['sources'])} shown)"
    return f"{words}, over {over}."
