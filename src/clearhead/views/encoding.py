"""What is written where the output's encoding lacks a sign."""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
from collections.abc import Iterator

__all__ = ["any_encoding"]

# Each sign by one of ASCII, as far as that goes, so that columns stay under each other.
_SIGNS = dict(zip("█■▓▒░·▏▎▍▌▋▊▉␣⏎⇥␡◌∅…–—×", "###+-.---####_$>^o0~--x", strict=True))
_SIGNS |= {"≥": ">=", "≤": "<=", "\u2068": "", "\u2069": ""}  # isolates have no width
_SIGNS |= {chr(0x2400 + code): "^" for code in range(32)}


@contextlib.contextmanager
def any_encoding() -> Iterator[None]:
    """Write signs that the output's encoding lacks in ASCII, and other characters as escapes."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):
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
