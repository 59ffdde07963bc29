"""Output streams of a command: control characters are escaped, a closed pipe stops no work."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from clearhead.views.encoding import any_encoding
from clearhead.views.labels import visible

__all__ = ["SafeStream", "output_streams"]


@contextlib.contextmanager
def output_streams() -> Iterator[None]:
    """Pass all that is printed inside the block through `SafeStream`."""
    # A stream that was closed before the start is None.
    with contextlib.ExitStack() as opened:
        out, err = (
            opened.enter_context(open(os.devnull, "w", encoding="utf-8")) if s is None else s
            for s in (sys.stdout, sys.stderr)
        )
        opened.enter_context(contextlib.redirect_stdout(out))
        opened.enter_context(any_encoding())
        opened.enter_context(contextlib.redirect_stdout(SafeStream(out)))
        opened.enter_context(contextlib.redirect_stderr(SafeStream(err, needed=False)))
        try:
            yield
            sys.stdout.flush()
        finally:
            # Also after help was printed, which raises SystemExit.
            with contextlib.suppress(OSError):
                sys.stdout.flush()


class SafeStream:
    """A text stream that escapes control characters on a terminal, and tolerates a closed pipe.

    `lost` becomes True when the reader has closed the pipe; further output is dropped. A stream
    that is not `needed`, because it reports progress, is also lost on any other error (full disk).
    """

    def __init__(self, stream: Any, *, needed: bool = True, escape: bool = True) -> None:
        self._stream, self._needed = stream, needed
        self._escape = escape and stream.isatty()
        self.lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def unescaped(self) -> SafeStream:
        """The same stream for text that is escaped already, and may have colours."""
        return SafeStream(self._stream, needed=self._needed, escape=False)

    def write(self, text: str) -> int:
        """Write, unless nobody reads any more."""
        if not self.lost:
            with self._losing():
                self._stream.write(visible(text) if self._escape else text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write one line after another; they hold their own line ends."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hand everything to the system."""
        if not self.lost:
            with self._losing():
                self._stream.flush()

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What is still buffered is written again when the process ends: to nobody.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self.lost = True
            if self._needed and not isinstance(error, BrokenPipeError):
                raise
