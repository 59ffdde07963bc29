"""Where in a model each attention call is made, and its number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead._capture.axes import Place, held_heads
from clearhead._capture.call import Call
from clearhead._capture.handler import Handler, in_short
from clearhead._capture.modules.stack import Modules
from clearhead._capture.provenance import Provenance, tensors
from clearhead._capture.transformers import InterfaceCall
from clearhead._core import is_mapped, value_error

__all__ = ["Sites"]


class Sites:
    """Gives each call of one run its module, layer, number and kind."""

    def __init__(self, modules: Modules, provenance: Provenance, reads_values: bool) -> None:
        self._modules = modules
        self._provenance = provenance
        self._reads_values = reads_values
        self._through: list[InterfaceCall] = []
        self._layers: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._kinds: dict[str, str] = {}
        self._slices: dict[str, str] = {}

    @property
    def listening(self) -> bool:
        """Whether a call made now belongs to the model, and is not recomputed by a checkpoint."""
        return self._modules.active and torch._C._current_graph_task_id() == -1

    @property
    def positions(self) -> set[int]:
        """The sizes that may be numbers of positions."""
        return self._modules.positions

    @property
    def of_modules(self) -> bool:
        """Whether the model is a module, whose inputs are known."""
        return bool(self._modules.names)

    @property
    def running(self) -> str:
        """The dotted name of the module that makes a call now."""
        return self._through[-1].module if self._through else self._modules.current

    @property
    def interface(self) -> InterfaceCall | None:
        """The call of an attention interface that is in progress, if any."""
        return self._through[-1] if self._through else None

    @contextlib.contextmanager
    def through(self, call: InterfaceCall) -> Iterator[InterfaceCall]:
        """Run inside a call of an attention interface."""
        self._through.append(call)
        try:
            yield call
        finally:
            self._through.pop()

    def seen(self) -> None:
        """Note that the call in progress of an attention interface has been seen."""
        if self._through:
            self._through[-1].seen = True

    def unreadable(self, given: Any) -> str | None:
        """Say why nobody may read the tensors of a call, if so."""
        for tensor in tensors(given):
            if tensor.is_nested:
                return "its tensors are nested (jagged), and one weight map has no such lengths"
            if hasattr(tensor, "device_mesh"):
                return "its tensors are DTensors: let the projections give the local ones"
            if is_mapped(tensor):
                return "it runs inside of torch.vmap, where no values can be read"
        return None

    def not_followed(self, handler: Handler) -> Callable[[Any, Exception], None]:
        """Report to a handler a function whose result could not be followed."""

        def report(func: Any, error: Exception) -> None:
            name = getattr(func, "__name__", str(func))
            handler.unseen(
                self.running, f"the result of {name} could not be followed ({in_short(error)})"
            )

        return report

    def roots(self, query: Tensor, key: Tensor) -> tuple[int, int] | None:
        """Give what query and key descend from, where both are known."""
        left, right = self._provenance.origin(query), self._provenance.origin(key)
        return (left.root, right.root) if left and right else None

    def locate(self, call: Call, roots: tuple[int, int] | None) -> Call:
        """Give the call its module, layer, number and kind."""
        if self._reads_values and call.value.is_meta:
            rule = "is on the meta device, where tensors have no values"
            raise value_error("model", rule, hint="clearhead.estimate needs shapes only")
        module = self.running
        layer = self._layers.setdefault(module, len(self._layers))
        number = self._calls[module] = self._calls.get(module, -1) + 1
        kind, place = self._kind(module, roots), self._confirmed(module, call)
        if (held := held_heads(self._modules.inventory.by_name, module, call)) is not None:
            place = replace(place or Place(), heads=held)
        return replace(call, module=module, layer=layer, call=number, kind=kind, place=place)

    def _confirmed(self, module: str, call: Call) -> Place | None:
        """Take a call for a slice of samples and heads once another call has other ones.

        The first of several projections that are packed into one looks like a slice as well.
        """
        place, batch = call.place, call.sizes.batch
        if place is not None and place.flat:
            heads = self._modules.inventory.declared_heads(module)
            if heads > 1 and batch % heads == 0:
                text = f"its {heads} heads lie in a batch of {batch}, in an order that is not known"
                return replace(place, rows=text)
        if place is not None and place.shuffled:
            words = "its heads or samples stand in another order than in the layer"
            return replace(place, rows=words)
        if place is not None and place.turned:
            return replace(place, rows="its heads come before the batch, or are one axis with it")
        if place is None or not place.rows:
            return place
        first = self._slices.setdefault(module, place.rows)
        return replace(place, rows="") if first == place.rows else place

    def _kind(self, module: str, roots: tuple[int, int] | None) -> str:
        """Tell self from cross attention by whether query and key descend from one input."""
        declared = self._modules.inventory.declares_cross(module)
        if declared is not None:
            return "cross" if declared else "self"
        if roots is None:
            return self._kinds.get(module, "self")
        return self._kinds.setdefault(module, "self" if roots[0] == roots[1] else "cross")
