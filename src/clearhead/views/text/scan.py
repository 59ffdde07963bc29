"""A scan as it goes on, and what it counted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn

from clearhead.views.terminal import Terminal

if TYPE_CHECKING:
    from clearhead.heads.corpus import Job

__all__ = ["scan_progress", "scan_summary"]

# Seconds between two lines of progress where there is no terminal.
QUIET = 30


@contextmanager
def scan_progress(share: float, tokens: int) -> Iterator[Callable[[float, int], None]]:
    """Show what share of the corpus is read, how fast, and how long the rest takes."""
    speed = _Speed(share, tokens)
    if not sys.stderr.isatty():
        yield speed.line_now_and_then
        return
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Terminal(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=1000, completed=round(1000 * share))
        yield lambda share, tokens: bar.update(
            task, completed=round(1000 * share), description=speed.words(share, tokens)
        )


class _Speed:
    """Tokens a second since the start, or since a resumed scan went on."""

    def __init__(self, share: float, tokens: int) -> None:
        self.started = self.last = time.monotonic()
        self.share, self.tokens = share, tokens

    def words(self, share: float, tokens: int) -> str:
        gone = time.monotonic() - self.started
        fresh = share - self.share
        left = gone * (1 - share) / fresh if fresh > 0 else 0
        speed = (tokens - self.tokens) / gone if gone else 0
        return f"{tokens:,} tokens, {speed:,.0f} a second, {_clock(left)} left"

    def line_now_and_then(self, share: float, tokens: int) -> None:
        if time.monotonic() - self.last >= QUIET:
            self.last = time.monotonic()
            print(f"{share:.0%}, {self.words(share, tokens)}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def scan_summary(job: Job) -> list[str]:
    """Say what was read, what was left out, and what has to be known of the numbers."""
    survey = job.survey
    heads = sum(layer.heads for layer in survey.layers)
    lines = [
        f"{job.place.record:,} records, {survey.sequences:,} sequences, {survey.tokens:,} tokens: "
        f"{len(survey.layers)} layers, {heads} heads"
    ]
    for reason, (count, place) in job.problems().items():
        lines.append(f"left out: {count:,} {reason}; the first: {place}")
    return lines + [f"note: {note}" for note in survey.notes]
