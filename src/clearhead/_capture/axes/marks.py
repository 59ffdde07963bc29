"""What is known of live tensors: where they come from, and what their axes are."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.nn.parameter import Parameter

__all__ = ["Marks", "is_parameter"]


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter; plain tensors are told apart in less time."""
    return type(tensor) is not Tensor and isinstance(tensor, Parameter)


class Marks:
    """A table from live tensors to an origin and a step to a layout; it keeps no tensor alive."""

    def __init__(self) -> None:
        self._table: dict[int, tuple[weakref.ref[Tensor], Any, Any]] = {}

    def origin(self, tensor: object) -> Any:
        """The origin of a tensor, None where it is not known."""
        found = self._table.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def step(self, tensor: object) -> Any:
        """The step to the layout of a tensor, None where it is not known."""
        found = self._table.get(id(tensor))
        return found[2] if found is not None and found[0]() is tensor else None

    def set(self, tensor: Tensor, origin: Any, step: Any) -> None:
        """Set both."""
        key, table = id(tensor), self._table

        def forget(ref: weakref.ref[Tensor]) -> None:
            if key in table and table[key][0] is ref:
                del table[key]

        table[key] = (weakref.ref(tensor, forget), origin, step)

    def set_origin(self, tensor: Tensor, origin: Any) -> None:
        """Set the origin, and leave the layout."""
        self.set(tensor, origin, self.step(tensor))

    def set_step(self, tensor: Tensor, step: Any) -> None:
        """Set the step to the layout, and leave the origin."""
        self.set(tensor, self.origin(tensor), step)
