"""A training with a monitor, whose history stands beside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from clearhead.monitoring.attaching import Monitor, monitor

__all__ = ["recorded"]


@contextmanager
def recorded(
    model: nn.Module, out: Path, start: int, steps: int, write: bool = True
) -> Iterator[Monitor]:
    """Monitor a training from step `start` on, and write the history into the directory `out`.

    It is written also where the training was stopped. A run that was resumed has a file of its
    own, whose name says after which step it begins. Of several processes one should `write`.
    """
    found = monitor(model, alarms=False, steps=max(1, steps - start))
    try:
        yield found
    finally:
        found.close()
        if found.history and write:
            found.save(out / (f"monitor-{start}.safetensors" if start else "monitor.safetensors"))
