"""The number of threads of a small model: one, unless the caller chose another."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from clearhead._core import value_error

__all__ = ["SMALL", "check_threads", "small_threads"]

# Numbers in what one layer hands to the next (batch x position x width) up to which one thread is
# used. On idle cores a second thread gains little below this size, and two fifths at twice of it
# (dev/LOG.md); on busy cores it makes a small step many times slower, because the threads wait for
# each other after every operation, a time slice of the scheduler each.
SMALL = 1 << 17
# More threads than this, or than cores, only wait for each other. torch creates as many as
# it is given, and crashes where the system refuses to create more.
MOST = 256
# torch.set_num_threads after this import, or a variable of the environment, is the caller's choice.
_AT_START = torch.get_num_threads()
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def check_threads(threads: int | None) -> None:
    """Refuse an invalid number of threads, and one that would exhaust the machine."""
    if threads is None:
        return
    if not isinstance(threads, int) or threads < 1:
        raise value_error("threads", "needs to be a whole number of 1 or more", got=threads)
    most = max(MOST, os.cpu_count() or 1)
    if threads > most:
        raise value_error("threads", f"may be at most {most} here", got=threads)


@contextlib.contextmanager
def small_threads(model: Any, tokens: int, threads: int | None = None) -> Iterator[int]:
    """Use one thread inside the block for small work, and afterwards as many as before.

    >>> with small_threads(None, 1000, threads=1):
    ...     torch.get_num_threads()
    1

    `tokens` counts those of one forward; a model of another library, whose width is unknown, counts
    as large. `threads` overrides the choice; so do OMP_NUM_THREADS, MKL_NUM_THREADS and
    `torch.set_num_threads`.
    """
    check_threads(threads)
    config = getattr(model, "config", None)
    width = config.get("width") if isinstance(config, dict) else None
    small = width is not None and tokens * width <= SMALL
    before = torch.get_num_threads()
    chosen = before != _AT_START or any(name in os.environ for name in _VARIABLES)
    wanted = threads or (1 if small and not chosen else before)
    if wanted == before:
        yield before
        return
    torch.set_num_threads(wanted)
    try:
        yield wanted
    finally:
        torch.set_num_threads(before)
