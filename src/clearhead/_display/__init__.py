"""How objects show themselves in a notebook, without knowing what draws them.

A class says `_repr_mimebundle_ = mimebundle`. Its renderer lies on a floor above, among the views;
the top of the package, which is imported before all of its parts, provides it here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["mimebundle", "provide"]

Render = Callable[[Any], dict[str, Any]]
_provided: list[Render] = []


def provide(render: Render) -> None:
    """Set what draws objects: a function from an object to its texts and pictures by MIME type."""
    _provided[:] = [render]


def mimebundle(self: Any, include: Any = None, exclude: Any = None) -> dict[str, Any]:
    """Show an object in a notebook: as text always, and as HTML or a picture where it has one."""
    found = _provided[0](self) if _provided else {"text/plain": repr(self)}
    return {
        kind: data
        for kind, data in found.items()
        if (not include or kind in include) and not (exclude and kind in exclude)
    }
