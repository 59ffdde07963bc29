"""Dropout of some rows of a batch that drops what dropout of the whole batch drops in them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["RowsOfDropout"]


class RowsOfDropout(TorchFunctionMode):
    """Inside the block `F.dropout` draws for the whole batch, and uses the draws of some rows.

    So the numbers of processes change no losses. Dropout inside of `nn.GRU` is not reached.
    """

    def __init__(self, rows: slice, batch: int) -> None:
        super().__init__()
        self.rows, self.batch = rows, batch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0 or not input.numel():
            return F.dropout(input, p, training, inplace)
        # Numbers are drawn in the order in which the tensor of the whole batch would lie in memory.
        # An axis of one row may have the stride of the axis around which it lies.
        axes = range(input.ndim)
        order = sorted(axes, key=lambda axis: (-input.stride(axis), -input.shape[axis]))
        sizes = [self.batch if axis == 0 else input.shape[axis] for axis in order]
        kept = F.dropout(input.new_ones(sizes), p)
        kept = kept.permute([order.index(axis) for axis in range(input.ndim)])[self.rows]
        return input.mul_(kept) if inplace else input * kept
