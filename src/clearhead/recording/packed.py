"""The value of a record until it is first read: packed, in a memory mapping of its own.

A record is made between large tensors that come and go. Tensors kept there would pin the heap of
the C library, down to the few bytes of their headers: it cannot shrink past what is in use, and
the gaps between do not fit the next large tensor. So a packed value is no tensor and is not on the
heap; ordinary tensors are made of it when it is first read.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["PackedValue", "pack"]

# Fewer bytes are not worth the pages; glibc maps as large a tensor by itself.
_LEAST, _MOST = 1 << 16, 1 << 25
# Numbers begin at whole cache lines.
_ALIGNED = 64
# Private: a process forked from this one has pages of its own.
_FLAGS = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
# Most of what is packed are positions, which the readings give in int64, with -1 for none.
_NARROW = torch.uint8, torch.int16, torch.int32
_lock = threading.Lock()


class _Slot(NamedTuple):
    """Where the numbers of a tensor are in the block, and their shape and dtypes."""

    start: int
    shape: torch.Size
    packed: torch.dtype
    dtype: torch.dtype

    def numbers(self, block: mmap.mmap) -> Tensor:
        count = self.shape.numel()
        flat = torch.frombuffer(block, dtype=self.packed, count=count, offset=self.start)
        return flat.view(self.shape)


class PackedValue:
    """A packed value: a call unpacks it, and gives the same object each time.

    `nbytes` is what it takes in memory while packed, beside tensors that were left as they were.
    """

    def __init__(self, block: mmap.mmap, leaves: list[Any], spec: Any) -> None:
        self.nbytes = len(block)
        self._block: mmap.mmap | None = block
        self._leaves, self._spec = leaves, spec
        self._value: Any = None

    def __call__(self) -> Any:
        """Unpack the value."""
        with _lock:
            if self._block is not None:
                self._value = self._unpacked(self._block)
                self._block, self._leaves = None, []
        return self._value

    def _unpacked(self, block: mmap.mmap) -> Any:
        # The first reader may be in inference mode; the tensors are for all readers.
        with torch.inference_mode(False), torch._C.DisableTorchFunction(), torch.no_grad():
            leaves = [
                x.numbers(block).to(x.dtype, copy=True) if isinstance(x, _Slot) else x
                for x in self._leaves
            ]
        return pytree.tree_unflatten(leaves, self._spec)

    def __reduce__(self) -> Any:
        # What is copied, pickled or sent is the value.
        return _same, (self(),)


def _same(value: Any) -> Any:
    return value


def pack(value: Any) -> Any:
    """Return a tensor or tuples of them, as a `PackedValue` where that saves memory.

    Tensors on other devices and very large ones stay as they are.
    """
    leaves, spec = pytree.tree_flatten(value)
    if sum(x.nbytes for x in leaves if _movable(x)) < _LEAST:
        return value
    size, packed, pairs = 0, list(leaves), []
    for at, x in enumerate(leaves):
        if _movable(x):
            slot = _Slot(size, x.shape, _narrow(x), x.dtype)
            size += -(-x.numel() * slot.packed.itemsize // _ALIGNED) * _ALIGNED
            packed[at] = slot
            pairs.append((slot, x))
    block = mmap.mmap(-1, size, **_FLAGS)
    for slot, x in pairs:
        slot.numbers(block).copy_(x)
    return PackedValue(block, packed, spec)


def _movable(x: Any) -> bool:
    plain = type(x) is Tensor and x.layout is torch.strided and x.is_cpu
    return plain and 0 < x.nbytes < _MOST


def _narrow(x: Tensor) -> torch.dtype:
    """The smallest dtype that holds whole numbers exactly; that of the tensor for others."""
    if x.dtype != torch.int64:
        return x.dtype
    least, most = (int(end) for end in torch.aminmax(x))
    fit = (d for d in _NARROW if torch.iinfo(d).min <= least and most <= torch.iinfo(d).max)
    return next(fit, x.dtype)
