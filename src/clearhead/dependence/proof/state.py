"""Leave the model as it was: parameters, buffers, attributes, modes, hooks and random state."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Snapshot", "modules_in", "random_state", "restore_random", "untouched"]

# Copies of parameters are kept up to this many bytes; above it a forward that edits them is told.
MOST_COPIED = 1 << 28


def random_state() -> tuple[Any, ...]:
    """Read every generator that a model may draw from."""
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    drawn = numpy.random.get_state() if numpy else None
    return torch.get_rng_state(), cuda, random.getstate(), drawn


def restore_random(state: tuple[Any, ...]) -> None:
    """Put every generator back."""
    on_cpu, on_cuda, plain, drawn = state
    torch.set_rng_state(on_cpu)
    if on_cuda is not None:
        torch.cuda.set_rng_state_all(on_cuda)
    random.setstate(plain)
    if drawn is not None:
        sys.modules["numpy"].random.set_state(drawn)


class Snapshot:
    """All that a forward could change about a model, to be compared and put back."""

    def __init__(self, model: object):
        modules = list({id(m): m for _, root in modules_in(model) for m in root.modules()}.values())
        self._attributes = [(module.__dict__, _shallow(module.__dict__)) for module in modules]
        self._tensors = list(_tensors_of(modules))

    def restore(self) -> list[str]:
        """Put everything back; name what had changed."""
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
    """Give the model back as it came, also after an exception; yields a way to do so in between."""
    state, snapshot = random_state(), Snapshot(model)
    try:
        yield snapshot.restore
    finally:
        snapshot.restore()
        restore_random(state)


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.copy() if isinstance(value, dict | list | set) else value
        for name, value in attributes.items()
    }


def _put_back(live: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """Undo assignments and edits of containers, keeping the identity of the containers."""
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
    weight = sum(p.nbytes for p in parameters.values() if p is not None and p.device.type != "meta")
    for module in modules:
        kind = type(module).__name__
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or tensor.is_inference() or tensor.device.type == "meta":
                continue
            keep = name in module._buffers or weight <= MOST_COPIED
            copy = tensor.detach().clone() if keep else None
            yield f"{kind}.{name}", tensor, tensor._version, copy
        # Tensors kept as plain attributes are state too (a cache that grows, a running mean).
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_inference():
                yield f"{kind}.{name}", value, value._version, value.detach().clone()


def _differ(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    # Parameters are too many to compare on every run; edits behind autograd's back are only
    # looked for in what is small.
    return tensor.numel() <= 4096 and not torch.equal(tensor.detach(), copy)


def modules_in(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The module itself, or those that a function, method or partial closes over."""
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
