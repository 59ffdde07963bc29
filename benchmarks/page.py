"""A table in its place on a page of the docs, between two marks."""

from __future__ import annotations

from pathlib import Path

from table import write

BEGIN, END = "<!-- cost -->", "<!-- end of cost -->"


def place(path: Path, table: str) -> None:
    """Put the table where the page has its marks; what stands around them stays as it is."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no place for the table: {BEGIN} ... {END}")
    write(path, f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
