"""Requests to stop: SIGINT, SIGTERM and SIGHUP, handled alike."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["StopRequests"]


class StopRequests:
    """Inside the block a request raises KeyboardInterrupt, so that resources are released.

    >>> with StopRequests() as stop:
    ...     with stop.deferred():
    ...         signal.raise_signal(signal.SIGTERM)
    ...         print(stop.asked)
    True

    In a `deferred` block the first request sets `asked` and prints `message`; a second one raises,
    unless `patient`: torchrun passes on what its processes have received as well.
    The previous handlers are restored on exit. Only the main thread can install handlers; in any
    other thread there are no requests.
    """

    def __init__(self, message: str = "", patient: bool = False) -> None:
        self.message, self.patient = message, patient
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
        if not (self._deferred and (first or self.patient)):
            raise KeyboardInterrupt
        if not first:
            return
        # Not through a stream, which the signal may have interrupted in a write.
        with suppress(OSError):
            os.write(2, self.message.encode())

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer the first request: the block checks `asked`."""
        if self.asked:  # an import or a destructor has swallowed the KeyboardInterrupt
            raise KeyboardInterrupt
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False


def _signals() -> list[int]:
    found: list[int] = [signal.SIGINT, signal.SIGTERM]
    # A closed terminal is a request too, unless nohup has set the signal to be ignored.
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        found.append(hangup)
    return found
