"""Readings of the weight map itself in the kernel: rows, whole maps, and the overlap of heads."""

# The methods are documented once, in Output and Grad.
# ruff: noqa: D102
from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clearhead import readings
from clearhead.attention.impl.native.base import Grad, Output, total
from clearhead.attention.impl.native.call import Inputs, new, split
from clearhead.readings import Reading

__all__ = ["OverlapGrad", "Rows", "RowsGrad", "ScoresGrad"]

# How many weights the gradient of overlaps holds at a time.
WEIGHTS = 1 << 21


class Rows(Output):
    """The weights of all queries that any of the readings shows: `Rows` and `Weights`."""

    def __init__(self, inputs: Inputs, read: list[Any]):
        super().__init__(inputs, read)
        self.row_of, count = _row_numbers(read, inputs.shape[2])
        self.rows = new(*inputs.shape[:2], count, inputs.source).zero_()

    def bind(self, call: Any, part: range) -> None:
        if self.rows.numel():
            call.set_rows(self.row_of.data_ptr(), self.rows.shape[2], self.rows.data_ptr())

    def value(self, reading: Any) -> Tensor:
        if isinstance(reading, readings.Weights):
            return self.rows
        return self.rows[..., self.row_of[list(reading.queries)].long(), :]


class RowsGrad(Grad):
    """The gradients of all rows, added up where several readings show one."""

    def __init__(self, inputs: Inputs, lse: Tensor, terms: Tensor):
        super().__init__(inputs, lse, terms)
        self.grads: list[tuple[Reading, Tensor]] = []

    def add(self, reading: Reading, value: Any, grad: Tensor) -> None:
        self.grads.append((reading, self.flat(grad)))

    @cached_property
    def whole(self) -> tuple[Tensor, Tensor]:
        """The row of the second tensor that has the gradient of a query's weights, -1 for none."""
        query = self.inputs.shape[2]
        if len(self.grads) == 1 and isinstance(self.grads[0][0], readings.Weights):
            return torch.arange(query, dtype=torch.int32), self.grads[0][1]
        row_of, count = _row_numbers([reading for reading, _ in self.grads], query)
        whole = new(*self.inputs.shape[:2], count, self.inputs.source).zero_()
        for reading, grad in self.grads:
            rows = row_of[list(_queries(reading, query))]
            whole.index_add_(2, rows.long(), grad)
        return row_of, whole

    def bind(self, call: Any, part: range, grads: dict[Any, Any]) -> None:
        if OverlapGrad in grads:
            # It adds these rows to its own: a kernel call has room for one set.
            return
        row_of, whole = self.whole
        if whole.numel():
            call.set_rows_grad(row_of.data_ptr(), whole.shape[2], whole.data_ptr())


def _queries(reading: Any, query: int) -> Sequence[int]:
    """The queries whose weights a reading shows, in its order."""
    if isinstance(reading, readings.Weights):
        return range(query)
    return [x % query for x in reading.queries]


def _row_numbers(read: Iterable[Reading], query: int) -> tuple[Tensor, int]:
    """Number the queries that are shown, -1 for the others; and count them."""
    read = list(read)
    if any(isinstance(reading, readings.Weights) for reading in read):
        return torch.arange(query, dtype=torch.int32), query
    shown = sorted({x for reading in read for x in _queries(reading, query)})
    row_of = torch.full((query,), -1, dtype=torch.int32)
    row_of[shown] = torch.arange(len(shown), dtype=torch.int32)
    return row_of, len(shown)


class ScoresGrad(Grad):
    """The gradient of the scores, which the kernel adds to that of each score."""

    any_value = True
    grad: Tensor | None = None

    def add(self, reading: Any, value: Any, grad: Tensor) -> None:
        self.grad = total(self.grad, self.flat(grad))

    def bind(self, call: Any, part: range, grads: dict[Any, Any]) -> None:
        assert self.grad is not None
        call.set_scores_grad(self.grad.data_ptr())


class OverlapGrad(Grad):
    """The gradient of overlaps, which each head's weights have from the weights of the others."""

    any_value = True

    def __init__(self, inputs: Inputs, lse: Tensor, terms: Tensor):
        super().__init__(inputs, lse, terms)
        # A kernel call reads the edges that its inputs wrote out last: these have their own.
        self.inputs = copy(inputs)
        self.grad: Tensor | None = None
        self.bound: tuple[Tensor, Tensor] | None = None

    def add(self, reading: Any, value: Any, grad: Tensor) -> None:
        self.grad = total(self.grad, self.flat(grad))

    def split(self, parts: list[range]) -> list[range]:
        batch, head, _ = self.inputs.shape
        return split(parts, WEIGHTS // (batch * head * self.inputs.source))

    def bind(self, call: Any, part: range, grads: dict[Any, Any]) -> None:
        maps = self._weights(part)
        grad = (self.factor @ maps.flatten(2)).view(maps.shape)
        if RowsGrad in grads:
            row_of, whole = grads[RowsGrad].whole
            rows = row_of[part.start : part.stop]
            grad[:, :, rows >= 0] += whole[:, :, rows[rows >= 0].long()]
        row_of = torch.full((self.inputs.shape[2],), -1, dtype=torch.int32)
        row_of[part.start : part.stop] = torch.arange(len(part), dtype=torch.int32)
        # The call reads them after this returns.
        self.bound = row_of, grad
        call.set_rows_grad(row_of.data_ptr(), len(part), grad.data_ptr())

    def _weights(self, part: range) -> Tensor:
        """The weights of some queries, (batch, head, query of the part, source)."""
        rows = Rows(self.inputs, [readings.Rows([*part])])
        out = self.inputs.query.new_empty(*self.inputs.shape, self.inputs.value.shape[3])
        call = self.inputs.call(out, part)
        rows.bind(call, part)
        call.run(0)
        return rows.rows

    @cached_property
    def factor(self) -> Tensor:
        """How much of each head's weights the gradient of another's has, (batch, head, head)."""
        parts = self.split(self.inputs.parts())
        maps = (self._weights(part).flatten(2) for part in parts)
        products = torch.stack([x @ x.mT for x in maps]).sum(0)
        with torch.enable_grad():
            products.requires_grad_()
            value = readings.Overlap().finish(products)
        (found,) = torch.autograd.grad(value, products, self.grad)
        return found + found.mT
