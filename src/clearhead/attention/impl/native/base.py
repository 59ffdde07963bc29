"""What the kernel does for one kind of reading: fill its value, and take in its gradient."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.impl.native import kernel
from clearhead.attention.impl.native.call import SLOTS, Inputs, new, split

__all__ = ["Grad", "Output", "Sums", "total"]

# How many blocks of queries a call adds to one accumulator in fp32.
BLOCKS = 32


class Output:
    """The memory that a kernel call fills for all readings of one kind."""

    # Whether one kernel call has room for several different readings of the kind.
    several = True
    # How many accumulators its sums over queries have, at most.
    slots = SLOTS

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


class Sums:
    """Sums over queries, of some numbers a head: few terms in fp32, and these sums in fp64."""

    def __init__(self, inputs: Inputs, *shape: int):
        self.slots = inputs.slots(prod(shape))
        self.each = new(self.slots, *inputs.shape[:2], *shape).zero_()
        self.whole: Tensor | None = None
        self.begun = False

    def split(self, parts: list[range]) -> list[range]:
        """Parts of few enough queries to add up in fp32."""
        return split(parts, BLOCKS * self.slots * kernel._native.block())

    def begin(self) -> int:
        """Return the address of the sums of the next part of the queries."""
        if self.begun:
            self.whole = total(self.whole, self.each.sum(0).to(torch.float64))
            self.each.zero_()
        self.begun = True
        return self.each.data_ptr()

    def value(self) -> Tensor:
        """The sums over all queries."""
        return total(self.whole, self.each.sum(0)).to(torch.float32)


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
