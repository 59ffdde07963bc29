"""DTensors as inputs: their local shares are attended over, and the results are DTensors again."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from clearhead._core import type_error, value_error
from clearhead.readings import MapReading, PerQueryReading, Reading

__all__ = ["Sharding", "group_of", "sharding_of"]

NAMES = ("query", "key", "value")
HINT = (
    "shard all three over the positions, distribute_tensor(x, mesh, [Shard(x.ndim - 2)]), or pass "
    "this rank's shares as plain tensors, x.to_local()"
)


class Sharding(NamedTuple):
    """The mesh of sharded inputs, and how many queries there are on all ranks."""

    mesh: Any
    queries: int

    def wrap(self, x: Tensor, axis: int | None) -> Any:
        """This rank's rows of a whole that is sharded along an axis; None: x is the whole."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if axis is None:
            if x.requires_grad:
                # A loss on a replicated DTensor has the same gradient on every rank, once.
                x.register_hook(lambda grad: grad / self.mesh.size())
            return DTensor.from_local(x, self.mesh, [Replicate()])
        shape = list(x.shape)
        shape[axis] = self.queries
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            x, self.mesh, [Shard(x.ndim + axis)], shape=torch.Size(shape), stride=stride
        )

    def wrap_value(self, reading: Reading, value: Any) -> Any:
        """The value of a reading: sharded where it has rows, else the same on every rank."""
        axis = None
        if isinstance(reading, (MapReading, PerQueryReading)):
            axis = -2 if isinstance(reading, MapReading) else reading.axis
        return pytree.tree_map_only(Tensor, lambda x: self.wrap(x, axis), value)


def group_of(group: Any, *tensors: Any) -> Any:
    """The group of the mesh of the first DTensor, else the one that is given.

    A mesh of several axes is refused: the ranks along its last one tell each other.
    """
    meshes = [x.device_mesh for x in tensors if _is_sharded(x)]
    return meshes[0].get_group(meshes[0].ndim - 1) if meshes else group


def sharding_of(group: Any, *tensors: Any) -> Sharding | None:
    """The mesh of DTensors, which are all sharded over the positions; None for plain tensors."""
    sharded = [_is_sharded(x) for x in tensors]
    if not any(sharded):
        return None
    if not all(sharded):
        got = ", ".join(type(x).__name__ for x in tensors)
        raise type_error("query, key, value", "are all DTensors, or none is", got=got, hint=HINT)
    mesh = tensors[0].device_mesh
    if any(x.device_mesh != mesh for x in tensors):
        raise value_error("query, key, value", "are on one device mesh", hint=HINT)
    if mesh.ndim != 1:
        hint = "shard them over one axis of it, such as mesh['cp']"
        raise value_error("query", "is on a device mesh of one axis", got=mesh, hint=hint)
    if group is not None and group != mesh.get_group():
        hint = "leave group out: that of the device mesh is taken"
        raise value_error("group", "is the group of the device mesh of DTensors", hint=hint)
    for name, x in zip(NAMES, tensors, strict=True):
        (placement,) = x.placements
        if not (placement.is_shard() and placement.dim % x.ndim == x.ndim - 2):
            rule = f"is sharded over the positions, Shard({x.ndim - 2})"
            raise value_error(name, rule, got=placement, hint=HINT)
    return Sharding(mesh, tensors[0].shape[-2])


def _is_sharded(x: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)
