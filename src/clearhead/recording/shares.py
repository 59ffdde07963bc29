"""Which share of a call's map a record has, where a model is split over ranks."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from clearhead import masks
from clearhead._capture import Call, FusedCall, dense_edges
from clearhead.masks import Mask

__all__ = ["Share", "in_the_whole", "note_of", "splits_batch"]


class Share(NamedTuple):
    """A part of an axis: the first of `size` heads, samples or positions, of `whole` on all ranks.

    `start` and `whole` are None where a rank does not know what the others have.
    """

    along: str  # "head", "batch" or "position"
    start: int | None
    size: int
    whole: int | None


def in_the_whole(
    call: Call, mask: Mask | None, queries: tuple[int, ...] | None, split: bool
) -> dict[str, Any]:
    """The fields of a record that tell of the whole map, and which share of it a call is.

    `split` is what `splits_batch` says of the model.
    """
    held, spread = call.place and call.place.heads, _spread(call)
    shares = [Share("batch", None, call.sizes.batch, None)] if split else []
    sizes, shared = call.sizes, call.source_heads
    if held is not None:
        shares.append(Share("head", held.start, sizes.head, held.whole))
        sizes, shared = sizes._replace(head=held.whole), held.shared
    if spread is not None:
        first, many = spread.first, sizes.query
        shares.append(Share("position", first, many, spread.sizes.query))
        sizes, mask = sizes._replace(query=spread.sizes.query), spread.mask
        queries = tuple(range(first, first + many)) if many < sizes.query else None
    elif mask is not None and mask.own.head not in (None, 1, call.all_heads):
        mask = _of_all_heads(call, mask)
    return {
        "sizes": sizes, "source_heads": shared, "mask": mask, "queries": queries,
        "shares": tuple(shares),
    }  # fmt: skip


def _of_all_heads(call: Call, mask: Mask) -> Mask:
    """Give a mask that differs by head those of other ranks, in which it has no edges."""
    edges = dense_edges(mask, call)
    whole = edges.new_zeros(edges.shape[0], call.all_heads, *edges.shape[2:])
    whole[:, call.heads.start : call.heads.stop] = edges
    return masks.dense(whole)


def splits_batch(model: Any) -> bool:
    """Whether each rank runs the model on samples of its own: under DDP and FSDP."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    kinds: list[type] = [torch.nn.parallel.DistributedDataParallel]
    sharded = sys.modules.get("torch.distributed.fsdp")
    if sharded is not None:
        kinds += [sharded.FSDPModule, sharded.FullyShardedDataParallel]
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(isinstance(module, tuple(kinds)) for module in modules)


def note_of(call: Call) -> str:
    """Say which share of its map a call is; empty where it is all of it."""
    joins = "are on this rank; clearhead.distributed.gather(seen) joins those of all ranks"
    if call.place is not None and call.place.heads is not None:
        here = f"{call.heads.start} to {call.heads.stop - 1} of {call.all_heads}"
        return f"tensor parallel: heads {here} {joins}"
    if (spread := _spread(call)) is not None:
        last = spread.first + call.sizes.query - 1
        here = f"{spread.first} to {last} of {spread.sizes.query}"
        return f"sequence parallel: positions {here} {joins}"
    return ""


def _spread(call: Call) -> Any:
    return call.spread if isinstance(call, FusedCall) else None
