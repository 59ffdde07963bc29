"""A sweep over the classes of a library as it goes on, and what it found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from clearhead.views.labels import visible
from clearhead.views.terminal import Terminal

if TYPE_CHECKING:
    from clearhead.dependence.library import Row

__all__ = ["render_sweep", "sweep_progress"]

# Seconds between two lines of progress where there is no terminal.
QUIET = 30
VERDICTS = ("ok", "fault", "by design", "not tested")


@contextmanager
def sweep_progress(limit: float, memory: float) -> Iterator[Callable[[int, int, str], None]]:
    """Show how many classes are done; say what each may take."""
    print(f"each class may take {limit:g} s and {memory:g} GiB", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        yield _line_now_and_then()
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Terminal(stderr=True), transient=True) as bar:
        task = bar.add_task("loading")
        yield lambda done, total, name: bar.update(
            task, completed=done, total=total, description=visible(name)
        )


def _line_now_and_then() -> Callable[[int, int, str], None]:
    last = time.monotonic()

    def tell(done: int, total: int, name: str) -> None:
        nonlocal last
        if time.monotonic() - last >= QUIET:
            last = time.monotonic()
            print(f"{done} of {total} classes, last {visible(name)}", file=sys.stderr, flush=True)

    return tell


def render_sweep(run: dict[str, Any], rows: Sequence[Row]) -> None:
    """Print the faults as a table, and what else was found as numbers."""
    from clearhead.dependence.library import counts

    console = Terminal()
    faults = [row for row in rows if row.verdict == "fault"]
    if faults:
        console.print(_faults(faults))
    for form, found in counts(rows).items():
        numbers = ", ".join(f"{found[one]} {one}" for one in VERDICTS if one in found)
        console.print(Text(f"{form}: {numbers}"))
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    console.print(Text(visible(versions)))


def _faults(rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("class", "backend", "question", "kind", "size", "logits", "first in"):
        table.add_column(name, overflow="fold")
    for row in rows:
        sizes = f"{row.size:.3g}", f"{row.logits:.3g}"
        cells = (row.name, row.backend, row.question, row.kind, *sizes, row.module)
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return table
