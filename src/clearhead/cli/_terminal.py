"""The one place that writes to the terminal: what does not fit, closed pipes, other encodings."""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Terminal", "any_encoding"]

# Each sign by one of ASCII, as far as that goes, so that columns stay under each other.
_SIGNS = dict(zip("█■▓▒░·▏▎▍▌▋▊▉␣⏎⇥␡◌∅…–—×", "###+-.---####_$>^o0~--x", strict=True))
_SIGNS |= {"≥": ">=", "≤": "<=", "\u2068": "", "\u2069": ""}  # isolates have no width
_SIGNS |= {chr(0x2400 + code): "^" for code in range(32)}


class Terminal(Console):
    """A console that cuts nothing off, pads no line in a pipe, and lets a closed pipe be known."""

    def __init__(self) -> None:
        super().__init__(file=sys.stdout, highlight=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a table wider than the terminal keeps its width, and the terminal wraps it."""
        for table in objects:
            if isinstance(table, Table):
                needs = self.measure(table, options=self.options.update(width=10_000))
                whole = all(column.no_wrap for column in table.columns)
                least = needs.maximum if whole else needs.minimum
                if least > self.width:
                    table.width, options["crop"] = least, False
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("\n".join(line.rstrip(" ") for line in captured.get().split("\n")))

    def on_broken_pipe(self) -> None:
        """Leave it to the command's one place for errors, where rich would exit with 1."""
        raise BrokenPipeError


@contextlib.contextmanager
def any_encoding() -> Iterator[None]:
    """Write signs that the output's encoding lacks in ASCII, and other characters as escapes."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or stream.encoding.lower().startswith("utf"):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="clearhead")
    try:
        yield
    finally:
        stream.reconfigure(errors=before)


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    first = error.object[error.start]
    return _SIGNS.get(first, first.encode("ascii", "backslashreplace").decode()), error.start + 1


codecs.register_error("clearhead", _in_ascii)
