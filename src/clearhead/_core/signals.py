"""Requests to stop: Ctrl-C, SIGTERM and the end of a terminal, all handled alike."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["StopRequests"]


class StopRequests:
    """Inside the block a request raises KeyboardInterrupt, so that what was begun is cleaned up.

    >>> with StopRequests() as stop:
    ...     with stop.deferred():
    ...         signal.raise_signal(signal.SIGTERM)
    ...         print(stop.asked)
    True

    A request in a `deferred` block only sets `asked`, and `message` is printed; a second one raises
    there too. The handlers of before are restored. Only the main thread can set handlers: in
    another one there are no requests.
    """

    def __init__(self, message: str = "") -> None:
        self.message = message
        self.asked = False
        self._deferred = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            for number in _signals():
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._before.clear()

    def _request(self, number: int, frame: object) -> None:
        first, self.asked = not self.asked, True
        if not (first and self._deferred):
            raise KeyboardInterrupt
        # Not through a stream, which the signal may have interrupted in a write.
        with suppress(OSError):
            os.write(2, self.message.encode())

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the first request wait for whoever looks at `asked`."""
        if self.asked:  # an import or a destructor has swallowed the KeyboardInterrupt
            raise KeyboardInterrupt
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False


def _signals() -> list[int]:
    found: list[int] = [signal.SIGINT, signal.SIGTERM]
    # A terminal that is closed asks too, unless nohup said to ignore that.
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        found.append(hangup)
    return found
