"""Which share of a call's map a record has, where a model is split over ranks."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from clearhead import masks
from clearhead._capture import Call, FusedCall, dense_edges
from clearhead._core import Sizes
from clearhead.masks import Mask

__all__ = [
    "Share",
    "note_of",
    "of_all_ranks",
    "queries_here",
    "shares_of",
    "sizes_of",
    "source_heads",
    "splits_batch",
]


class Share(NamedTuple):
    """A part of an axis: the first of `size` heads, samples or positions, of `whole` on all ranks.

    `start` and `whole` are None where a rank does not know what the others have.
    """

    along: str  # "head", "batch" or "position"
    start: int | None
    size: int
    whole: int | None


def shares_of(call: Call, split: bool) -> tuple[Share, ...]:
    """Tell which share of its map a call is; nothing where it is all of it.

    `split` is what `splits_batch` says of the model.
    """
    found = []
    if call.place is not None and call.place.heads is not None:
        found.append(Share("head", call.heads.start, len(call.heads), call.all_heads))
    if (spread := _spread(call)) is not None:
        found.append(Share("position", spread.first, call.sizes.query, spread.sizes.query))
    if split:
        found.append(Share("batch", None, call.sizes.batch, None))
    return tuple(found)


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


def sizes_of(call: Call) -> Sizes:
    """The sizes of a map on all ranks; of samples, those of this one."""
    spread = _spread(call)
    query = call.sizes.query if spread is None else spread.sizes.query
    return call.sizes._replace(head=call.all_heads, query=query)


def queries_here(call: Call, chosen: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The numbers of the queries that were read; None where these are all of the map."""
    spread = _spread(call)
    if spread is None or call.sizes.query == spread.sizes.query:
        return chosen
    return tuple(range(spread.first, spread.first + call.sizes.query))


def source_heads(call: Call) -> int | None:
    """Count the heads of the keys on all ranks, where the call shows them."""
    if call.place is None or call.place.heads is None:
        return call.source_heads
    return call.place.heads.shared


def of_all_ranks(call: Call, mask: Mask | None) -> Mask | None:
    """Give the mask of the whole; one that differs by head has no edges in those of other ranks."""
    if (spread := _spread(call)) is not None:
        return spread.mask
    if mask is None or mask.own.head in (None, 1) or len(call.heads) == call.all_heads:
        return mask
    edges = dense_edges(mask, call)
    whole = edges.new_zeros(edges.shape[0], call.all_heads, *edges.shape[2:])
    whole[:, call.heads.start : call.heads.stop] = edges
    return masks.dense(whole)


def _spread(call: Call) -> Any:
    return call.spread if isinstance(call, FusedCall) else None
