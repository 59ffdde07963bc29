"""Requests to stop: a signal that waits for the end of a step instead of breaking it off."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["stop_requests"]


@contextmanager
def stop_requests(message: str = "") -> Iterator[list[int]]:
    """Collect the first Ctrl-C in the list that is given; a second one raises KeyboardInterrupt.

    `message` goes to standard error at the first one. Handlers are those of before afterwards, and
    outside of the main thread, which alone may set them, the list stays empty.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        # Not through a stream, which the signal may have interrupted in a write.
        with suppress(OSError):
            os.write(2, message.encode())

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
