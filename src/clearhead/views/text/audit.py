"""The report of an audit, and a sweep over the classes of a library, drawn on the terminal."""

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
    from clearhead.dependence import Report
    from clearhead.dependence.library import Row

__all__ = ["render_report", "render_sweep", "sweep_progress"]

# Seconds between two lines of progress where there is no terminal.
QUIET = 30
VERDICTS = ("ok", "fault", "by design", "not tested")


def render_report(report: Report) -> None:
    """Print the report, its findings as a table."""
    console = Terminal()
    console.print(Text(report.headline, style="bold green" if report.ok else "bold red"))
    if report.findings:
        console.print(_findings(report))
        if report.moved > len(report.findings):
            console.print(f"and {report.moved - len(report.findings)} more")
        for hint in dict.fromkeys(f.hint for f in report.findings if f.hint):
            console.print(Text(hint))
    for line in report.details:
        console.print(Text(line))


def _findings(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    # In a finding of `audit.batch` the output is a sample, seen at a position.
    of_samples = any(finding.kind == "batch" for finding in report.findings)
    place = ("position", "sample") if of_samples else ("sample", "output")
    for name in (*place, "depends on", "moved by", "rounding", "first in"):
        table.add_column(name, overflow="fold")
    for f in report.findings:
        cells = (f.sample, f.query, f.source, f"{f.size:.3g}", f"{f.floor:.1g}", f.module)
        table.add_row(*(Text(visible(str(cell))) for cell in cells))
    return table


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
