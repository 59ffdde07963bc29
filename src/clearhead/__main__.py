"""The command `clearhead`, also as `python -m clearhead`: Ctrl-C is exit code 130 from here on."""

from __future__ import annotations

import os
import signal
from typing import Any


def main() -> int:
    """Run the command, with signals that end the process at once until it has work to save."""
    _open_standard_streams()
    _handle(_stop)
    from clearhead.cli import process

    code = process()
    # All is done but the end of the interpreter, which would reset any handler.
    _handle(signal.SIG_IGN)
    return code


def _handle(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _open_standard_streams() -> None:
    """Keep a file that is opened later from becoming standard output or error."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _stop(number: int, frame: object) -> None:
    # No exception: one that is raised while torch is imported may get lost, or be reported twice.
    try:
        os.write(2, b"\ninterrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    raise SystemExit(main())
