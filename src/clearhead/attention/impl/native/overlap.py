"""The weights of all heads, some queries at a time, of which the gradient of overlaps is made."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from clearhead import readings
from clearhead.attention.impl.native import kernel

__all__ = ["Overlap", "split"]

# So many weights are there at a time.
WEIGHTS = 1 << 21


def split(inputs: kernel.Inputs, parts: list[range]) -> list[range]:
    """Parts of few enough queries to hold their weights."""
    batch, head, _, _ = inputs.query.shape
    return kernel.split(parts, max(1, WEIGHTS // (batch * head * inputs.key.shape[2])))


def weights(inputs: kernel.Inputs, part: range) -> Tensor:
    """The weights of some queries, (batch, head, query of the part, source)."""
    query, value = inputs.query, inputs.value
    out = torch.empty(*query.shape[:3], value.shape[3], dtype=query.dtype)
    results = kernel.Results(inputs, (readings.Rows([*part]),), graph=False)
    call = inputs.call(out, part)
    results.ask(call, part)
    call.run(0)
    return results.rows


class Overlap:
    """What the gradient of overlaps adds to those of weights: the weights of the other heads."""

    def __init__(self, inputs: kernel.Inputs):
        # A kernel call reads the edges that its inputs wrote out last: these have their own.
        self.inputs = copy(inputs)
        self.total: Tensor | None = None
        self.factor: Tensor | None = None
        self.told: tuple[Tensor, Tensor] | None = None

    def add(self, share: Tensor) -> None:
        """Take in a gradient of the value, (batch, head, head)."""
        self.total = share if self.total is None else self.total + share

    def tell(self, call: Any, part: range, more: tuple[Tensor, Tensor] | None) -> None:
        """Tell a kernel call on some queries; `more` has rows of the gradients of all weights."""
        if self.factor is None:
            self.factor = self._factor()
        maps = weights(self.inputs, part)
        change = (self.factor @ maps.flatten(2)).view(maps.shape)
        if more is not None:
            rows = more[0][part.start : part.stop]
            change[:, :, rows >= 0] += more[1][:, :, rows[rows >= 0].long()]
        row_of = torch.full((self.inputs.query.shape[2],), -1, dtype=torch.int32)
        row_of[part.start : part.stop] = torch.arange(len(part), dtype=torch.int32)
        # The call reads them after this returns.
        self.told = row_of, change
        call.set_rows_grad(row_of.data_ptr(), len(part), change.data_ptr())

    def _factor(self) -> Tensor:
        """How much of each head's weights the gradient of another's gets, (batch, head, head)."""
        maps = (
            weights(self.inputs, part).flatten(2)
            for part in split(self.inputs, self.inputs.parts())
        )
        products = torch.stack([x @ x.mT for x in maps]).sum(0)
        with torch.enable_grad():
            products.requires_grad_()
            value = readings.Overlap().finish(products)
        (found,) = torch.autograd.grad(value, products, self.total)
        return found + found.mT
