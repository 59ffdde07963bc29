"""The implementations of `attend`, in order of priority, and the choice between them."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from clearhead._core import value_error
from clearhead.attention.impl import ops
from clearhead.attention.impl.native import Native
from clearhead.attention.impl.reference import Reference
from clearhead.attention.impl.tiled import Tiled
from clearhead.attention.problem import Problem
from clearhead.readings import Reading

__all__ = ["IMPLEMENTATIONS", "NATIVE", "Implementation", "available", "choose"]


class Implementation(Protocol):
    """One way to compute a call. Implementations do not import each other."""

    name: str

    def state(self) -> str:
        """Say in a few words whether it is ready here, and what it runs on."""
        ...

    def unsupported_reasons(self, problem: Problem, read: tuple[Reading, ...]) -> list[str]:
        """List all reasons why it cannot serve the call; an empty list means that it can."""
        ...

    def attend(self, problem: Problem, read: tuple[Reading, ...]) -> tuple[Tensor, list[Any]]:
        """Return the context and the value of each reading, with gradients."""
        ...

    def readings_only(self, problem: Problem, read: tuple[Reading, ...]) -> list[Any]:
        """Return the value of each reading, without a gradient."""
        ...


# The fallback computes what the kernel does not support; the reference computes what must be plain
# torch operations.
TILED, REFERENCE = Tiled(), Reference()
NATIVE = Native(fallback=TILED, reference=REFERENCE)
# First choice first.
IMPLEMENTATIONS: tuple[Implementation, ...] = (NATIVE, TILED, REFERENCE)

ops.register("cpu", NATIVE.operator)


def choose(problem: Problem, read: tuple[Reading, ...], impl: str | None = None) -> Implementation:
    """Return the first implementation that can serve the call, or the one with this name."""
    for implementation in IMPLEMENTATIONS:
        if impl is None:
            if not implementation.unsupported_reasons(problem, read):
                return implementation
        elif impl == implementation.name:
            return _forced(implementation, problem, read)
    names = ", ".join(implementation.name for implementation in IMPLEMENTATIONS)
    raise value_error("impl", f"is one of {names}, or None for the first that can serve", got=impl)


def _forced(
    implementation: Implementation, problem: Problem, read: tuple[Reading, ...]
) -> Implementation:
    if reasons := implementation.unsupported_reasons(problem, read):
        why = "".join(f"\n  - {reason}" for reason in reasons)
        raise value_error("impl", f"{implementation.name!r} cannot serve this call:{why}")
    return implementation


def available() -> dict[str, str]:
    """Say for each implementation whether it can serve here, and what it runs on.

    >>> available()["reference"]
    'ready'
    """
    return {implementation.name: implementation.state() for implementation in IMPLEMENTATIONS}
