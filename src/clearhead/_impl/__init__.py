"""The implementations of `attend`, in order of priority, and the choice between them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from clearhead._impl.problem import Problem
from clearhead.errors import value_error
from clearhead.readings import Reading

__all__ = ["NAMES", "available", "choose", "implementations"]

NAMES = ("native", "tiled", "reference")
_loaded: list[ModuleType] = []


def implementations() -> list[ModuleType]:
    """Return the implementation modules, first choice first.

    They are imported on the first call, because they need the masks, which need this package.
    """
    if not _loaded:
        found = [name for name in NAMES if find_spec(f"{__name__}.{name}")]
        _loaded.extend(import_module(f"{__name__}.{name}") for name in found)
        if found[:2] == ["native", "tiled"]:  # the kernel leaves to the next what it does not have
            _loaded[0].rest = _loaded[1]
        for module, after in zip(_loaded, _loaded[1:], strict=False):
            # They do not know each other; one that does only a part hands on the rest.
            if hasattr(module, "rest"):
                module.rest = after
    return _loaded


def choose(problem: Problem, read: tuple[Reading, ...], impl: str | None) -> ModuleType:
    """Return the first implementation that can serve the call, or the one asked for by name."""
    for module in implementations():
        if impl is None:
            if not module.unsupported_reasons(problem, read):
                return module
        elif impl == module.NAME:
            return _forced(module, problem, read)
    names = ", ".join(module.NAME for module in implementations())
    raise value_error("impl", f"is one of {names}, or None for the first that can serve", got=impl)


def _forced(module: ModuleType, problem: Problem, read: tuple[Reading, ...]) -> ModuleType:
    if reasons := module.unsupported_reasons(problem, read):
        why = "".join(f"\n  - {reason}" for reason in reasons)
        raise value_error("impl", f"{module.NAME!r} cannot serve this call:{why}")
    return module


def available() -> dict[str, str]:
    """Say for each implementation whether it is there, and what it runs on.

    >>> available()["reference"]
    'ready'
    """
    states = {}
    by_name = {module.NAME: module for module in implementations()}
    for name in NAMES:
        module = by_name.get(name)
        state = getattr(module, "state", lambda: "ready")
        states[name] = state() if module else "not installed"
    return states
