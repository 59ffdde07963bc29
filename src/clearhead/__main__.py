"""The command `clearhead`, also as `python -m clearhead`: Ctrl-C is exit code 130 from here on."""

from __future__ import annotations

import os
import signal
from typing import Any


def main() -> int:
    """Run the command; until a command has work to save, a signal ends the process at once."""
    _open_standard_streams()
    _handle(_stop)
    from clearhead.cli import process

    code = process()
    # The interpreter resets handlers while it shuts down, but keeps signals that are ignored.
    _handle(signal.SIG_IGN)
    return code


def _handle(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _open_standard_streams() -> None:
    """Open closed standard streams, or the next file that is opened would become one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _stop(number: int, frame: object) -> None:
    # Not an exception: raised while torch is imported, it may be swallowed or reported twice.
    try:
        os.write(2, b"\ninterrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    raise SystemExit(main())
