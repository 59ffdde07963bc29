"""What cuts now, by thread: blocks on the same model join, and a watch sees what is left."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["join", "leave", "running"]

_running = threading.local()


def running(model: Any) -> Any:
    """Give what cuts this model in this thread."""
    found = [cutter for cutter in getattr(_running, "cutters", ()) if cutter.model is model]
    return found[-1] if found else None


def join(cutter: Any) -> None:
    """Let others know that this cuts now."""
    _running.cutters = [*getattr(_running, "cutters", ()), cutter]


def leave(cutter: Any) -> None:
    """Let others know that this cuts no more."""
    _running.cutters = [other for other in _running.cutters if other is not cutter]
