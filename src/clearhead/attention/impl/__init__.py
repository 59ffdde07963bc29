"""The implementations of `attend`, in order of priority, and the choice between them."""

from __future__ import annotations

from types import ModuleType

from clearhead._core import value_error
from clearhead.attention.impl import reference
from clearhead.attention.impl.native import native
from clearhead.attention.impl.tiled import tiled
from clearhead.attention.problem import Problem
from clearhead.readings import Reading

__all__ = ["IMPLEMENTATIONS", "available", "choose"]

# First choice first. They do not know each other: one that does a part hands on the rest.
IMPLEMENTATIONS: tuple[ModuleType, ...] = (native, tiled, reference)
native.rest, native.spec = tiled, reference


def choose(problem: Problem, read: tuple[Reading, ...], impl: str | None) -> ModuleType:
    """Return the first implementation that can serve the call, or the one asked for by name."""
    for module in IMPLEMENTATIONS:
        if impl is None:
            if not module.unsupported_reasons(problem, read):
                return module
        elif impl == module.NAME:
            return _forced(module, problem, read)
    names = ", ".join(module.NAME for module in IMPLEMENTATIONS)
    raise value_error("impl", f"is one of {names}, or None for the first that can serve", got=impl)


def _forced(module: ModuleType, problem: Problem, read: tuple[Reading, ...]) -> ModuleType:
    if reasons := module.unsupported_reasons(problem, read):
        why = "".join(f"\n  - {reason}" for reason in reasons)
        raise value_error("impl", f"{module.NAME!r} cannot serve this call:{why}")
    return module


def available() -> dict[str, str]:
    """Say for each implementation whether it can serve here, and what it runs on.

    >>> available()["reference"]
    'ready'
    """
    states = {}
    for module in IMPLEMENTATIONS:
        state = getattr(module, "state", None)
        states[module.NAME] = state() if state else "ready"
    return states
