"""What `mask` gathered, drawn on the terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from clearhead.masks import Map, picture
from clearhead.views.labels import many
from clearhead.views.terminal import Terminal

__all__ = ["cells_of_terminal", "render_mask"]

# Runs of sources listed for a row.
SHOWN = 20


def cells_of_terminal(query: int, source: int) -> int:
    """Tiles a side that fit the terminal: two columns each, beside the row numbers."""
    return max(1, min(64, (Terminal().width - len(str(query)) - 1) // 2))


def render_mask(seen: dict[str, Any]) -> None:
    """Draw what was gathered of a mask on the terminal."""
    console = Terminal()
    for line in _lines(seen):
        console.print(_coloured(line), soft_wrap=True)


def _lines(seen: dict[str, Any]) -> list[str]:
    shape = f"{many(seen['query'], 'query', 'queries')} x {many(seen['source'], 'source')}"
    shown = [f"{seen['expression']}   {shape}"]
    if row := seen.get("row"):
        shown.append(f"query {row['query']} may read {_sources(row['sources'])}")
    if why := seen.get("why"):
        shown += [why["verdict"], *why["reasons"]]
    if maps := seen.get("maps"):
        drawn = [Map(**{name: each[name] for name in Map._fields}) for each in maps]
        shown += ["", *picture(drawn).split("\n"), "", _total(seen)]
    return shown


def _total(seen: dict[str, Any]) -> str:
    edges = sum(each["edges"] for each in seen["maps"])
    total = seen["query"] * seen["source"] * len(seen["maps"])
    share = f" ({edges / total:.1%})" if total else ""
    return f"{edges:,} of {total:,} edges{share}"


def _sources(row: list[int]) -> str:
    """Positions, runs of them as ranges: 0, 3-5."""
    runs: list[list[int]] = []
    for source in row:
        if runs and runs[-1][1] == source - 1:
            runs[-1][1] = source
        else:
            runs.append([source, source])
    named = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    cut = [*named[:SHOWN], f"and {len(named) - SHOWN} more runs"] if len(named) > SHOWN else named
    return f"{many(len(row), 'source')}: {', '.join(cut)}" if row else "no source"


def _coloured(line: str) -> Text:
    text = Text(line)
    text.highlight_regex("[■▓▒░]+", "bold cyan")
    text.highlight_regex("·", "dim")
    return text
