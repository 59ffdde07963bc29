"""Leave the model as it was: parameters, buffers, attributes, modes, hooks and RNG state."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Snapshot", "modules_in", "random_state", "restore_random", "untouched"]

# Copies of parameters are kept up to this many bytes; above that an edit is reported, not undone.
MOST_COPIED = 1 << 28


def random_state() -> tuple[Any, ...]:
    """Read every generator that a model may draw from."""
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    drawn = numpy.random.get_state() if numpy else None
    return torch.get_rng_state(), cuda, random.getstate(), drawn


def restore_random(state: tuple[Any, ...]) -> None:
    """Restore every generator."""
    on_cpu, on_cuda, plain, drawn = state
    torch.set_rng_state(on_cpu)
    if on_cuda is not None:
        torch.cuda.set_rng_state_all(on_cuda)
    random.setstate(plain)
    if drawn is not None:
        sys.modules["numpy"].random.set_state(drawn)


class Snapshot:
    """Everything about a model that a forward can change, to be compared and restored."""

    def __init__(self, model: object):
        modules = list({id(m): m for _, root in modules_in(model) for m in root.modules()}.values())
        self._attributes = [(module.__dict__, _shallow(module.__dict__)) for module in modules]
        self._tensors = list(_tensors_of(modules))

    def restore(self) -> list[str]:
        """Restore everything; return the names of what had changed."""
        changed = []
        for live, kept in self._attributes:
            changed += _put_back(live, kept)
        for name, tensor, version, copy in self._tensors:
            if tensor._version == version and not (copy is not None and _differ(tensor, copy)):
                continue
            changed.append(name)
            if copy is not None:
                tensor.data.copy_(copy)
        self._tensors = [(name, t, t._version, copy) for name, t, _, copy in self._tensors]
        return sorted({name for name in changed if not name.startswith("_")})


@contextmanager
def untouched(model: object) -> Iterator[Callable[[], list[str]]]:
    """Leave the model as it was, also after an exception; yields a function to do so in between."""
    generators, snapshot = random_state(), Snapshot(model)
    try:
        yield snapshot.restore
    finally:
        snapshot.restore()
        restore_random(generators)


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.copy() if isinstance(value, dict | list | set) else value
        for name, value in attributes.items()
    }


def _put_back(live: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """Undo assignments and edits of containers, and keep the identity of the containers."""
    changed = [name for name in live.keys() - kept.keys()]
    for name in changed:
        del live[name]
    for name, copy in kept.items():
        value = live.get(name)
        if not isinstance(copy, dict | list | set):
            if value is not copy:
                live[name] = copy
                changed.append(name)
        elif not _same_items(value, copy):
            changed.append(name)
            _refill(live, name, copy)
    return changed


def _refill(live: dict[str, Any], name: str, copy: Any) -> None:
    value = live.get(name)
    if type(value) is not type(copy):
        live[name] = copy.copy()
    elif isinstance(value, list):
        value[:] = copy
    elif isinstance(value, dict | set):
        value.clear()
        value.update(copy)


def _same_items(value: Any, copy: Any) -> bool:
    if type(value) is not type(copy) or len(value) != len(copy):
        return False
    if isinstance(copy, dict):
        return all(name in value and value[name] is item for name, item in copy.items())
    if isinstance(copy, list):
        return all(left is right for left, right in zip(value, copy, strict=True))
    return value == copy


def _tensors_of(modules: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor, int, Any]]:
    parameters = {id(p): p for module in modules for p in module._parameters.values()}
    size = sum(p.nbytes for p in parameters.values() if p is not None and p.device.type != "meta")
    for module in modules:
        for name, tensor in _held_tensors(module):
            keep = name not in module._parameters or size <= MOST_COPIED
            copy = tensor.detach().clone() if keep else None
            yield f"{type(module).__name__}.{name}", tensor, tensor._version, copy


def _held_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # Tensors in plain attributes are state too (a cache that grows, a running mean).
    for held in (module._parameters, module._buffers, vars(module)):
        for name, value in held.items():
            if not isinstance(value, torch.Tensor) or value.is_inference():
                continue
            if value.device.type != "meta":
                yield name, value


def _differ(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    # Parameters are too many to compare on every run; edits that bypass the version counter are
    # looked for in small tensors only.
    return tensor.numel() <= 4096 and not torch.equal(tensor.detach(), copy)


def modules_in(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module itself, or the modules that a function, method or partial refers to."""
    if isinstance(model, nn.Module):
        yield "", model
        return
    held = [getattr(model, "__self__", None), getattr(model, "func", None)]
    held += [cell.cell_contents for cell in getattr(model, "__closure__", None) or ()]
    code = getattr(model, "__code__", None)
    names = code.co_names if code else ()
    held += [getattr(model, "__globals__", {}).get(name) for name in names]
    for value in held:
        if isinstance(value, nn.Module):
            yield "", value
