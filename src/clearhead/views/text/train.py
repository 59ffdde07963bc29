"""A training as it goes on: a bar on a terminal, lines in a pipe; and what the model learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft

if TYPE_CHECKING:
    from clearhead.models import Step, Training

__all__ = ["render_samples", "train_progress"]


@contextmanager
def train_progress(training: Training) -> Iterator[Callable[[Step], None]]:
    """Show a bar with loss and time left on a terminal, and plain lines in a pipe."""
    count = sum(parameter.numel() for parameter in training.model.parameters())
    steps = training.settings.steps
    console = Console(stderr=True, highlight=False)
    console.print(f"{training.model.name}: {count:,} parameters, {steps} steps")
    if console.is_terminal:
        with _bar(training, console) as show:
            yield show
        return

    def line(step: Step) -> None:
        if step.validation is not None:
            losses = f"loss {step.loss:.3f}  validation {step.validation:.3f}"
            console.print(f"step {step.number}/{steps}  {losses}")

    yield line


@contextmanager
def _bar(training: Training, console: Console) -> Iterator[Callable[[Step], None]]:
    losses = TextColumn("loss {task.fields[loss]}  validation {task.fields[validation]}  left")
    with Progress(MofNCompleteColumn(), BarColumn(), losses, TimeLeft(), console=console) as bar:
        steps, done = training.settings.steps, training.step
        task = bar.add_task("train", total=steps, completed=done, loss="...", validation="...")

        def show(step: Step) -> None:
            bar.update(task, completed=step.number, loss=f"{step.loss:.3f}")
            if step.validation is not None:
                bar.update(task, validation=f"{step.validation:.3f}")

        yield show


def render_samples(samples: dict[str, str]) -> str:
    """Show what `clearhead.models.samples` gave: a text, or gaps above what fills them."""
    if "text" in samples:
        return f"A sample:\n{samples['text']}\n"
    gaps, filled = samples["gaps"], samples["filled"]
    return f"Gaps, and what the model puts there:\n{gaps!r}\n{filled!r}\n"
