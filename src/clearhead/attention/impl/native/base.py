"""What the kernel does for one kind of reading: fill its value, and take in its gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead.attention.impl.native.call import Inputs

__all__ = ["Grad", "Output", "total"]


class Output:
    """The memory that a kernel call fills for all readings of one kind."""

    # Whether one kernel call has room for several different readings of the kind.
    several = True

    def __init__(self, inputs: Inputs, read: list[Any]):
        self.inputs = inputs

    @staticmethod
    def supports(inputs: Inputs, reading: Any) -> bool:
        """Whether the kernel computes this reading of this call."""
        return True

    def split(self, parts: list[range]) -> list[range]:
        """Cut the parts of a call where the reading needs memory for each query."""
        return parts

    def bind(self, call: Any, part: range) -> None:
        """Set the memory in a kernel call on some of the queries."""
        raise NotImplementedError

    def value(self, reading: Any) -> Any:
        """The value of one of the readings, with one batch axis."""
        raise NotImplementedError


class Grad:
    """What the gradients of all readings of one kind add to the gradients of the weights.

    `terms` is shared by all kinds: sum_k p_ik x_ik of each row, which `add` accumulates.
    """

    # Whether `add` needs the reading's value.
    needs_value = False
    # Whether the kernel takes the gradient of every reading of the kind, also of one whose value
    # it has not computed.
    any_value = False

    def __init__(self, inputs: Inputs, lse: Tensor, terms: Tensor):
        self.inputs, self.lse, self.terms = inputs, lse, terms

    def add(self, reading: Any, value: Any, grad: Any) -> None:
        """Accumulate the gradient of one reading; `value` is None unless it is needed."""
        raise NotImplementedError

    def split(self, parts: list[range]) -> list[range]:
        """Cut the parts of a call where the gradient needs memory for each query."""
        return parts

    def bind(self, call: Any, part: range, grads: dict[Any, Any]) -> None:
        """Set the gradients in a kernel call on some queries; `grads` has those of every kind."""
        raise NotImplementedError

    def flat(self, x: Tensor) -> Tensor:
        """The tensor in float32, with one batch axis."""
        lead = self.inputs.problem.query.ndim - 2
        return x.detach().float().reshape(*self.inputs.shape[:2], *x.shape[lead:]).contiguous()


def total(before: Tensor | None, x: Tensor) -> Tensor:
    """Add a tensor to a sum that may have no terms yet."""
    return x if before is None else before + x
