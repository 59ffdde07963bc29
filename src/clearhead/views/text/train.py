"""A training as it goes on: a bar on a terminal, lines in a pipe; and what the model learned."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from clearhead.views.terminal import Terminal

if TYPE_CHECKING:
    from clearhead.models import Step, Training
    from clearhead.monitoring import Monitor

__all__ = ["heads_line", "train_progress", "training_end"]


@contextmanager
def train_progress(
    training: Training, monitor: Monitor | None = None
) -> Iterator[Callable[[Step], None]]:
    """Show a bar with loss and time left on a terminal, and plain lines in a pipe.

    What a monitor has read stands in the bar at every step, or in the lines.
    """
    count = sum(parameter.numel() for parameter in training.model.parameters())
    steps = training.settings.steps
    console = Terminal(stderr=True)
    console.print(f"{training.model.name}: {count:,} parameters, {steps} steps")
    if console.is_terminal:
        with _bar(training, console, monitor) as show:
            yield show
        return

    def line(step: Step) -> None:
        if step.validation is not None:
            losses = f"loss {step.loss:.3f}  validation {step.validation:.3f}"
            console.print(f"step {step.number}/{steps}  {losses}")
            if heads := heads_line(monitor):
                console.print(f" {heads}")

    yield line


@contextmanager
def _bar(
    training: Training, console: Terminal, monitor: Monitor | None
) -> Iterator[Callable[[Step], None]]:
    words = (
        "loss {task.fields[loss]}  validation {task.fields[validation]}{task.fields[heads]}  left"
    )
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn(words), TimeLeft())
    with Progress(*columns, console=console) as bar:
        steps, done = training.settings.steps, training.step
        fields: dict[str, Any] = {"loss": "...", "validation": "...", "heads": ""}
        task = bar.add_task("train", total=steps, completed=done, **fields)

        def show(step: Step) -> None:
            bar.update(
                task, completed=step.number, loss=f"{step.loss:.3f}", heads=heads_line(monitor)
            )
            if step.validation is not None:
                bar.update(task, validation=f"{step.validation:.3f}")

        yield show


def heads_line(monitor: Monitor | None) -> str:
    """The heads of the last step in a few words: which has the largest score and least entropy."""
    if monitor is None or not monitor.history:
        return ""
    rows = monitor.table()
    most, least = max(rows, key=lambda x: x["max_logit"]), min(rows, key=lambda x: x["entropy"])
    parts = [f"{row[name]:.2f} (head {row['layer']}.{row['head']})"
             for row, name in ((most, "max_logit"), (least, "entropy"))]  # fmt: skip
    return f"  max logit {parts[0]}  min entropy {parts[1]}"


def training_end(training: Training, out: Path, samples: dict[str, str]) -> list[str]:
    """Show what `clearhead.models.samples` gave, or how to resume; the last line names the result.

    A model continues a text, or a BERT fills gaps, which stand above what it puts there.
    """
    if not samples:
        return [
            f"Stopped after step {training.step} of {training.settings.steps}.",
            f"To go on: clearhead train --resume {shlex.quote(str(out))}",
            f"Wrote {out}",
        ]
    if "text" in samples:
        return [f"A sample:\n{samples['text']}\n", f"Wrote {out}"]
    gaps, filled = samples["gaps"], samples["filled"]
    return [f"Gaps, and what the model puts there:\n{gaps!r}\n{filled!r}\n", f"Wrote {out}"]
