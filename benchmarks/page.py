"""Tables on pages of the docs, each between two marks."""

from __future__ import annotations

from pathlib import Path

from table import write

BEGIN, END = "<!-- cost -->", "<!-- end of cost -->"


def place(path: Path, table: str, name: str = "cost") -> None:
    """Replace the text between the marks of a page by the table."""
    first, last = (mark.replace("cost", name) for mark in (BEGIN, END))
    before, begin, remainder = path.read_text(encoding="utf-8").partition(first)
    _, end, after = remainder.partition(last)
    if not (begin and end):
        raise ValueError(f"{path} has no place for the table: {first} ... {last}")
    write(path, f"{before}{first}\n\n{table}\n\n{last}{after}")
