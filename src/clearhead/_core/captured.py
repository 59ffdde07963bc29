"""The tensors that a user's function reads beside its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from types import CellType
from typing import Any

from torch import Tensor

__all__ = ["captured_tensors"]


def captured_tensors(function: Any) -> list[Tensor]:
    """The tensors that a function reads beside its arguments, which an edit changes."""
    found: dict[int, Tensor] = {}
    pending, known = [function], set[int]()
    while pending:
        one = pending.pop()
        if isinstance(one, Tensor):
            found[id(one)] = one
        elif id(one) not in known:
            known.add(id(one))
            pending += _parts(one)
    return list(found.values())


def _parts(one: Any) -> list[Any]:
    """What a function, a container or a callable object refers to."""
    if isinstance(one, (list, tuple)):
        return [*one]
    if isinstance(one, dict):
        return [*one.values()]
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if inspect.isfunction(one):
        return _referred(one)
    if inspect.ismethod(one):
        return _attributes(one.__self__, _names(one.__func__))
    return _attributes(one, _names(inspect.getattr_static(type(one), "__call__", None)))


def _referred(function: Any) -> list[Any]:
    names = _names(function)
    cells = [_content(cell) for cell in function.__closure__ or ()]
    found = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found += [x for name in names if isinstance(x := function.__globals__.get(name), Tensor)]
    return found + [x for one in cells for x in _attributes(one, names)]


def _names(function: Any) -> tuple[str, ...]:
    return getattr(getattr(function, "__code__", None), "co_names", ())


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def _attributes(one: Any, names: Iterable[str]) -> list[Any]:
    """The attributes of an object that code names."""
    own = {**getattr(one, "__dict__", {}), **getattr(one, "_buffers", {})}
    return [own[name] for name in names if name in own]
