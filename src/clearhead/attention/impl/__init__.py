"""The implementations of `attend`, in order of priority, and the choice between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead._core import value_error
from clearhead.attention.impl import ops
from clearhead.attention.impl.autograd import part_grad
from clearhead.attention.impl.native import Native
from clearhead.attention.impl.reference import Reference
from clearhead.attention.impl.tiled import Tiled
from clearhead.attention.problem import Problem
from clearhead.readings import LogSumExp, Reading

__all__ = [
    "IMPLEMENTATIONS",
    "NATIVE",
    "Implementation",
    "attend_part",
    "available",
    "choose",
    "part_grad",
    "part_gradient",
    "parts",
    "parts_gradient",
]


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


def parts(problem: Problem, read: tuple[Reading, ...], lse: Tensor) -> list[Any]:
    """Return the part of each reading in the larger map that the problem is a part of.

    `lse` is the log-sum-exp of the whole rows, (*batch, head, query).
    """
    return TILED.parts(problem, read, lse)


def parts_gradient(
    problem: Problem, read: tuple[Reading, ...], lse: Tensor, grads: list[Any], first: int
) -> tuple[list[Tensor | None], int]:
    """Return the gradients of query, key, bias and log-sum-exp in a part of a larger map.

    `grads` are those of the merged parts of the readings. The pieces of a map are counted from
    `first`; the number of the next one is returned too.
    """
    return TILED.parts_gradient(problem, read, lse, grads, first)


def attend_part(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the context and the log-sum-exp of a part of a larger map, without a gradient.

    The log-sum-exp is in float64.
    """
    with torch.no_grad():
        if not NATIVE.unsupported_reasons(problem, ()):
            found = NATIVE.attend_part(problem)
            if found is not None:
                return found
        read = (LogSumExp(),)
        context, (lse,) = choose(problem, read).attend(problem, read)
        return context, lse.double()


def part_gradient(
    problem: Problem, lse: Tensor, grad: Tensor, terms: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of query, key, value, bias and sinks in a part of a larger map.

    The whole rows have the log-sum-exp `lse`, and `terms`: the gradient of `lse`, less the product
    of the context with its gradient `grad`, (*batch, head, query).
    """
    if not NATIVE.unsupported_reasons(problem, ()):
        found = NATIVE.part_gradient(problem, lse, grad, terms, needs)
        if found is not None:
            return found
    return TILED.part_gradient(problem, lse, grad, terms, needs)


def available() -> dict[str, str]:
    """Say for each implementation whether it can serve here, and what it runs on.

    >>> available()["reference"]
    'ready'
    """
    return {implementation.name: implementation.state() for implementation in IMPLEMENTATIONS}
