"""Masks and biases that broadcast over some of several batch axes.

A flat batch axis has no stride for them: they would be written out. The call is split over batch
axes instead, so that they vary over all axes that are left, or over none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from clearhead._core import active_transforms
from clearhead.masks import Mask
from clearhead.readings import Reading

__all__ = ["join", "split", "split_axes"]

# Fewer numbers than this are written out.
SMALL = 1 << 22


def split_axes(query: Tensor, extras: Sequence[Any], read: Sequence[Reading]) -> tuple[int, ...]:
    """The batch axes to split over; () where nothing large would be written out.

    `extras` are the mask and the bias, whose shapes have been checked.
    """
    batch = query.shape[:-3]
    tensors = [x for x in extras if isinstance(x, Tensor)]
    varies = [[n > 1 for n in _lead(x, len(batch))] for x in tensors]
    large = any(
        not _is_even(axes, range(len(batch))) and prod(batch) * prod(x.shape[-3:]) > SMALL
        for x, axes in zip(tensors, varies, strict=True)
    )
    held = chain(extras, *(vars(reading).values() for reading in read))
    if not large or active_transforms() or any(map(_has_samples, held)):
        return ()
    every = range(len(batch))
    choices = chain.from_iterable(combinations(every, n) for n in range(len(batch) + 1))
    rest = {axes: [i for i in every if i not in axes] for axes in choices}
    even = [axes for axes in rest if all(_is_even(v, rest[axes]) for v in varies)]
    return min(even, key=lambda axes: prod(batch[i] for i in axes))


def split(x: Any, axes: Sequence[int], batch: Sequence[int]) -> list[Any]:
    """The pieces of an argument, in order; what is no tensor belongs to all of them."""
    if not isinstance(x, Tensor):
        return [x] * prod(batch[i] for i in axes)
    lead = _lead(x, len(batch))
    wanted = [batch[i] if i in axes else n for i, n in enumerate(lead)]
    pieces = [x.expand(*wanted, *x.shape[-3:])]
    for before, axis in enumerate(sorted(axes)):
        pieces = [part for piece in pieces for part in piece.unbind(axis - before)]
    return pieces


def join(results: Sequence[Any], axes: Sequence[int], batch: Sequence[int]) -> Any:
    """The results of all pieces as the result of the whole."""
    sizes = [batch[i] for i in axes]

    def whole(*pieces: Tensor) -> Tensor:
        return torch.stack(pieces).unflatten(0, sizes).movedim(tuple(range(len(axes))), axes)  # pyright: ignore[reportArgumentType, reportCallIssue]

    return pytree.tree_map(whole, results[0], *results[1:])


def _lead(x: Tensor, rank: int) -> tuple[int, ...]:
    """The batch axes of a mask or bias, 1 where it has none."""
    lead = tuple(x.shape[:-3])
    return (1,) * (rank - len(lead)) + lead


def _is_even(varies: Sequence[bool], axes: Sequence[int]) -> bool:
    """Whether a tensor varies over all of these axes or over none."""
    return len({varies[i] for i in axes}) < 2


def _has_samples(x: Any) -> bool:
    """Whether it is a mask with edges of its own for each sample of the flat batch."""
    return isinstance(x, Mask) and x.own.batch not in (None, 1)
