"""The shares of the ranks: consecutive positions, as torch.tensor_split cuts them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from clearhead._core import type_error, value_error
from clearhead.distributed.link import Link

__all__ = ["shard", "unshard"]


def shard(x: Tensor, axis: int = -2, *, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's share of the positions, a view: `x.tensor_split(world, axis)[rank]`.

    With 3 ranks, 7 positions are split into 3, 2 and 2. A rank beyond the last position has a
    share of size 0.
    """
    link = Link(group, "distributed.shard")
    _check(x, axis)
    return x.tensor_split(link.world, axis)[link.rank]


def unshard(x: Tensor, axis: int = -2, *, group: ProcessGroup | None = None) -> Tensor:
    """Return the whole on every rank, from the shares of all ranks.

    All ranks call it. The shares may differ in size along `axis` only. The result has no gradient:
    a loss is computed on the shares, where the gradients are.
    """
    link = Link(group, "distributed.unshard")
    _check(x, axis)
    if x.requires_grad and torch.is_grad_enabled():
        hint = "unshard(x.detach()), and compute the loss on the shares"
        raise value_error("x", "has no gradient, which does not pass over ranks here", hint=hint)
    shares = link.gather(x.detach().contiguous())
    link.agree("x", [(y.ndim, y.dtype, _others(y, axis)) for y in shares])
    return torch.cat(shares, axis)


def _others(x: Tensor, axis: int) -> tuple[int, ...]:
    """The sizes of all axes but one."""
    shape = list(x.shape)
    del shape[axis]
    return tuple(shape)


def _check(x: Tensor, axis: int) -> None:
    if not isinstance(x, Tensor):
        raise type_error("x", "is a tensor", got=type(x).__name__)
    if not -x.ndim <= axis < x.ndim:
        raise value_error("axis", "is an axis of x", got=axis, shapes={"x": x})
