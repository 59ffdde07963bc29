"""Numbers that choose layers, heads, queries, positions and calls."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from clearhead._core.errors import type_error, value_error

__all__ = ["is_number", "numbers", "position"]


def is_number(given: Any) -> bool:
    """Return whether it is an integer; True and False are not."""
    if type(given) is int:  # as nearly always, and quicker than to ask an abstract class
        return True
    return isinstance(given, Integral) and not isinstance(given, bool)


def numbers(name: str, given: Any) -> tuple[int, ...] | None:
    """Read one number or several; None stays None."""
    if given is None:
        return None
    if isinstance(given, (str, bytes)) or not (isinstance(given, Iterable) or is_number(given)):
        raise type_error(name, "takes numbers", got=repr(given))
    listed: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
    for number in listed:
        if not is_number(number):
            raise type_error(name, "takes numbers", got=repr(number))
    if not listed:
        raise value_error(name, "needs at least one number", got="none")
    return tuple(int(number) for number in listed)


def position(name: str, given: Any, size: int) -> int:
    """Check a position among `size`, counted from the end where negative."""
    if not is_number(given):
        raise type_error(name, "takes a position, as an integer", got=repr(given))
    if not -size <= given < size:
        raise value_error(name, f"lies in 0..{size - 1}, or counts from the end", got=given)
    return int(given) % size
