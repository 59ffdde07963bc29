"""Tables on pages of the docs, each between two marks."""

from __future__ import annotations

from pathlib import Path

from table import write

BEGIN, END = "<!-- cost -->", "<!-- end of cost -->"


def place(path: Path, table: str) -> None:
    """Replace the text between the marks of a page by the table."""
    before, begin, remainder = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = remainder.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no place for the table: {BEGIN} ... {END}")
    write(path, f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
