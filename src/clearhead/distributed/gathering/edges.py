"""The masks of several ranks as one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from clearhead import masks
from clearhead._core import Sizes
from clearhead.masks import Mask

__all__ = ["joined_mask"]

# Edges of the masks that are joined; larger ones are left out, as in the file of records.
_MOST = 1 << 26


def joined_mask(
    each: Sequence[tuple[Mask | None, Sizes]], axis: int | None, whole: Sizes, notes: list[str]
) -> Mask | None:
    """Join masks along an axis of their edges; where it is None, each is of the whole."""
    first = each[0][0]
    if all(mask == first for mask, _ in each) and not _varies(first, axis):
        return first
    if prod(whole) > _MOST:
        notes.append(f"the masks of the ranks differ, and are left out: {prod(whole):,} edges")
        return None
    edges = [_edges(mask, sizes) for mask, sizes in each]
    if axis is not None:
        return masks.dense(torch.cat(edges, axis))
    union = edges[0]
    for other in edges[1:]:
        union = union | other
    return masks.dense(union)


def _varies(mask: Mask | None, axis: int | None) -> bool:
    """Whether a mask of a share is not one of the whole, too."""
    if mask is None or axis is None:
        return False
    # Relative masks count the queries from the end.
    return axis == 2 or (mask.own.batch, mask.own.head)[axis] not in (None, 1)


def _edges(mask: Mask | None, sizes: Sizes) -> Tensor:
    if mask is None:
        return torch.ones(sizes, dtype=torch.bool)
    batch, head, query, source = sizes
    found = mask.dense(query, source, batch=batch, head=head)
    return found.expand(sizes) if found.ndim == 4 else found[None, None].expand(sizes)
