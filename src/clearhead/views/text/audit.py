"""The report of an audit, drawn on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from clearhead.views.labels import visible
from clearhead.views.terminal import Terminal

if TYPE_CHECKING:
    from clearhead.dependence import Report

__all__ = ["render_report"]


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
