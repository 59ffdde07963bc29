"""The forward pass of a call by the compiled kernel: the context and the supported readings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.impl.native import kernel
from clearhead.attention.impl.native.base import Output
from clearhead.attention.impl.native.call import Inputs, new
from clearhead.attention.impl.native.readings import KINDS, LogSumExp
from clearhead.attention.problem import Problem
from clearhead.readings import Reading

__all__ = ["Results", "forward", "in_range"]

# Where scores are larger, fp32 rounds them by more than the kernel's exponential tolerates.
LARGEST = 1e8


class Results:
    """What the kernel fills beside the context: the readings, and what the backward needs."""

    def __init__(self, inputs: Inputs, read: Sequence[Reading], graph: bool):
        # The largest score of each row, and one over its sum.
        self.softmax = new(2, *inputs.shape) if graph else None
        kinds: dict[Any, list[Reading]] = {LogSumExp: []} if graph else {}
        for reading in read:
            kinds.setdefault(KINDS[type(reading)].output, []).append(reading)
        self.outputs: dict[Any, Output] = {kind: kind(inputs, of) for kind, of in kinds.items()}
        self.slots = min((x.slots for x in self.outputs.values()), default=1)

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp, which a graph always has."""
        return self.outputs[LogSumExp].value(None)

    def split(self, parts: list[range]) -> list[range]:
        """Parts of few enough queries for every reading."""
        for output in self.outputs.values():
            parts = output.split(parts)
        return parts

    def bind(self, call: Any, part: range) -> None:
        """Set in a kernel call where its results go."""
        call.set_slots(self.slots)
        if self.softmax is not None:
            call.set_softmax(*(x.data_ptr() for x in self.softmax))
        for output in self.outputs.values():
            output.bind(call, part)

    def value(self, reading: Reading) -> Any:
        """The value of one reading, with one batch axis."""
        return self.outputs[KINDS[type(reading)].output].value(reading)


def forward(
    inputs: Inputs,
    read: Sequence[Reading] = (),
    graph: bool = False,
    strict: bool = True,
    mix: bool = True,
    turned: bool = False,
) -> tuple[Any, Results | None]:
    """Run the kernel: the context, (batch, head, query, value_dim), and the results to `read`.

    Without `mix` the context is None, and the time for it is saved. It is contiguous, unless it may
    be `turned` as the query is.

    If `strict`, raises OutOfRange where scores or sums are too large for fp32 to tell them apart,
    or not finite.
    """
    out = _empty(inputs, turned) if mix else None
    results = Results(inputs, read, graph) if read or graph else None
    parts = inputs.parts()
    if results is not None:
        parts = results.split(parts)
    for part in parts:
        call = inputs.call(out, part if len(parts) > 1 else None)
        if results is not None:
            results.bind(call, part)
        if call.run(0) and strict:
            raise kernel.OutOfRange
    return out, results


def _empty(inputs: Inputs, turned: bool) -> Tensor:
    """The context, to be filled; `turned`, its heads lie beside each other where the query's do.

    A model that joins its heads then copies nothing, nor keeps two contexts for its backward.
    """
    (batch, head, query), width, dtype = inputs.shape, inputs.value.shape[3], inputs.query.dtype
    if turned and inputs.query.stride(1) < inputs.query.stride(2):
        strides = query * head * width, width, head * width, 1
        return torch.empty_strided((batch, head, query, width), strides, dtype=dtype)
    return torch.empty(batch, head, query, width, dtype=dtype)


def in_range(problem: Problem) -> tuple[Tensor, Tensor]:
    """The context of a call that is out of range, and in which rows it is reliable."""
    out, results = forward(Inputs(problem), graph=True, strict=False)
    small = results.lse.abs() <= LARGEST  # type: ignore[union-attr]
    shape = (*problem.query.shape[:-1], -1)
    return out.reshape(shape), (small & out.isfinite().all(-1)).reshape(*shape[:-1], 1)
