"""Numbers with their words."""

from __future__ import annotations

__all__ = ["many"]


def many(number: int, one: str, more: str | None = None) -> str:
    """Put a number before its word.

    >>> many(1, "query", "queries"), many(2000, "head")
    ('1 query', '2,000 heads')
    """
    return f"{number:,} {one if number == 1 else more or one + 's'}"
