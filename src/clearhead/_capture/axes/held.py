"""Which heads of a layer this process holds, where tensor parallelism splits them over ranks.

Read from the weights: the projection that made the heads is a DTensor, sharded over its rows.
`fully_shard` shards weights as well, but gathers them for the forward; those here are whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["HeldHeads", "held_heads"]


class HeldHeads(NamedTuple):
    """The heads of a call among those of its layer on all ranks."""

    start: int
    whole: int
    shared: int | None  # heads of the keys on all ranks; None where that is not known


class _Rows(NamedTuple):
    """The rows of a weight that a rank holds: the first of them, how many, and of how many."""

    first: int
    here: int
    whole: int


def held_heads(modules: Mapping[str, nn.Module], name: str, call: Any) -> HeldHeads | None:
    """Tell which heads of a module a call in it has; None where it has all of them."""
    heads, shared = call.sizes.head, call.source_heads
    width = getattr(call, "query", call.value).shape[-1]
    if not (_may_be_split() and heads * width):
        return None
    weights = [_rows(x) for x in _weights(modules, name)]
    fused = (heads + 2 * (shared or heads)) * width
    found = next((x for x in weights if x.here in (heads * width, fused)), None)
    if found is None or found.here == found.whole:
        return None
    if heads * found.first % found.here or heads * found.whole % found.here:
        return None
    whole = heads * found.whole // found.here
    of_keys = next((x for x in weights if shared and x.here == shared * width), found)
    shared = shared and shared * of_keys.whole // of_keys.here
    return HeldHeads(heads * found.first // found.here, whole, shared)


def _may_be_split() -> bool:
    """Whether this process is a rank, and somebody has imported DTensors."""
    there = "torch.distributed.tensor" in sys.modules
    return there and torch.distributed.is_initialized()


def _weights(modules: Mapping[str, nn.Module], name: str) -> Iterator[Tensor]:
    """The matrices of a module, or of the nearest one around it that has any."""
    while True:
        found = [x for x in modules[name].parameters() if x.ndim == 2] if name in modules else []
        if found or not name:
            return iter(found)
        name = name.rpartition(".")[0]


def _rows(weight: Any) -> _Rows:
    """The rows of a weight that are here: all of them, or those of one mesh dimension's shard."""
    whole = weight.shape[0]
    placements = getattr(weight, "placements", ())
    sharded = [at for at, placed in enumerate(placements) if placed.is_shard(0)]
    if len(sharded) != 1:
        return _Rows(0, whole, whole)
    # As torch.chunk splits them.
    each = ceil(whole / weight.device_mesh.size(sharded[0]))
    first = min(each * weight.device_mesh.get_local_rank(sharded[0]), whole)
    return _Rows(first, min(each, whole - first), whole)
