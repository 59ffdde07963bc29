"""What torchrun says to a process of `clearhead train`, and where the run is written."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

__all__ = ["of_torchrun", "out_of", "resuming"]

_STATES = ("training.safetensors", "training.json")
_KEPT = ("command", "run", "file", "threads", "every", "monitor")


def of_torchrun() -> tuple[int, int] | None:
    """Give the number of this process and how many there are; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    from clearhead import distributed

    return distributed.of_torchrun()


def resuming(arguments: argparse.Namespace) -> argparse.Namespace:
    """Go on where the processes were, once torchrun has started all of them again."""
    out = out_of(arguments, arguments.file)
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if not again or arguments.resume or not any((out / name).exists() for name in _STATES):
        return arguments
    given = vars(arguments)
    fresh = dict.fromkeys(given) | {name: given[name] for name in _KEPT if name in given}
    return argparse.Namespace(**{**fresh, "resume": str(out), "force": False})


def out_of(arguments: argparse.Namespace, source: str | None, model: str | None = None) -> Path:
    """Give the directory of a run, unless it is resumed where it lies."""
    name = f"{Path(source or '').stem}-{model or arguments.model or 'gpt'}"
    return Path(arguments.out or name).expanduser()
