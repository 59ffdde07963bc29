"""The options that the forms of an audit share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clearhead._core import is_number, value_error
from clearhead.dependence.subject import Key

__all__ = ["AuditOptions", "read_ids"]


@dataclass(frozen=True)
class AuditOptions:
    """What to perturb, how often, and how precisely to measure; see `audit`."""

    depth: int = 1
    budget: int | None = None
    axis: int | None = None
    vocab: int | range | None = None
    change: Sequence[Key] | None = None
    changes: int = 2
    float64: bool = True

    def __post_init__(self) -> None:
        for name in ("depth", "budget", "changes"):
            value = getattr(self, name)
            if value is not None and (not is_number(value) or value < 1):
                raise value_error(name, "must be a whole number of at least 1", got=repr(value))


def read_ids(option: str, text: str) -> list[int]:
    """Read the document of each position, numbers with commas, from an option of that name."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        rule = "must be numbers with commas, 0,0,1,1"
        raise value_error(option, rule, got=repr(text)) from None
