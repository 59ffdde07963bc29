"""The inputs of a call as the kernel reads them, and a kernel call on some of the queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.attention.impl import dropout
from clearhead.attention.impl.layout import as_4d, bias_as_4d
from clearhead.attention.impl.native import kernel
from clearhead.attention.problem import Problem
from clearhead.masks import Mask

__all__ = ["Inputs", "ReadEdges", "broadcast_strides", "new", "readable", "sparse", "split"]

# The kernel takes at most this many intervals a row.
RANGES = 4
# A mask that is not a union of intervals is written out as bytes, for at most this many edges.
EDGES = 1 << 24
# Beyond MANY sources, a mask is sparse where strips of so many queries read at most one source in
# FEW on average.
MANY, STRIP, FEW = 2048, 32, 8
# Sums over queries have this many accumulators, whatever the threads, to have the same bits; fewer
# where they would hold more numbers than COPIES, and more than the sums themselves.
SLOTS, COPIES = 64, 1 << 22


def sparse(problem: Problem) -> bool:
    """Whether a mask has so few edges that only their sources are to be computed.

    The kernel computes whole tiles; the fallback gathers the sources that some queries may read.
    Masks that have ranges are not asked, and a stored one is read as it is.
    """
    mask, (*_, query, source) = problem.mask, problem.sizes
    if mask is None or source <= MANY or mask.stored:
        return False
    most = query // STRIP * source // FEW
    for first in range(0, query, STRIP):
        listed = mask.sources(range(first, min(first + STRIP, query)), problem.sizes)
        most -= source if listed is None else len(listed)
        if most < 0:
            return False
    return True


def readable(x: Tensor) -> Tensor:
    """The tensor as (batch, head, position, feature), with adjacent features."""
    if x.ndim != 4:
        x = as_4d(x)
    if x.is_neg():
        # Its memory holds the opposite sign (the imaginary part of a conjugate).
        x = x.resolve_neg()
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


class Inputs:
    """The tensors of a problem as the kernel reads them; they live as long as the call."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.query, self.key, self.value = map(
            readable, (problem.query, problem.key, problem.value)
        )
        self.ranges, self.edges, self.bias, self.sinks = None, None, None, None
        # (batch, head, query), and the number of sources.
        self.shape, self.source = tuple(self.query.shape[:3]), self.key.shape[2]
        if problem.mask is not None:
            self.ranges = problem.mask.ranges(self.shape[2], self.source, RANGES)
        if problem.bias is not None:
            bias = bias_as_4d(problem.bias.detach().resolve_neg(), problem)
            self.bias = bias.float().expand(*self.shape, self.source)
        if problem.sinks is not None:
            self.sinks = problem.sinks.detach().resolve_neg().float().contiguous()

    def slots(self, numbers: int = 1) -> int:
        """How many accumulators a sum over queries has, of so many numbers a head."""
        batch, head, query = self.shape
        most = min(SLOTS, COPIES // numbers) // (batch * head)
        return max(1, min(most, -(-query // kernel._native.block())))

    def parts(self) -> list[range]:
        """All queries, or as many at a time as have few enough edges to write out."""
        query, mask = self.shape[2], self.problem.mask
        if mask is None or self.ranges is not None or mask.stored:
            return [range(query)]
        return split(
            [range(query)], EDGES // ((mask.own.batch or 1) * (mask.own.head or 1) * self.source)
        )

    def call(self, out: Tensor | None, part: range | None = None) -> Any:
        """A kernel call on some of the queries, without results other than the context."""
        q, k, v = self.query, self.key, self.value
        if part is not None:
            q = q[:, :, part.start : part.stop]
            out = None if out is None else out[:, :, part.start : part.stop]
        place = (0, (0, 0, 0, 0)) if out is None else (out.data_ptr(), out.stride())
        call = kernel._native.Forward(
            kernel.TYPES[q.dtype], q.data_ptr(), q.shape, q.stride(), k.data_ptr(), k.shape,
            k.stride(), v.data_ptr(), v.shape, v.stride(), *place,
            self.problem.scale,
        )  # fmt: skip
        self._bind_mask(call, part)
        if part is not None:
            call.set_part(part.start, self.shape[2])
        if self.bias is not None:
            bias = self.bias if part is None else self.bias[:, :, part.start : part.stop]
            call.set_bias(bias.data_ptr(), bias.stride())
        if self.sinks is not None:
            call.set_sinks(self.sinks.data_ptr())
        if self.problem.softcap is not None:
            call.set_softcap(self.problem.softcap)
        if self.problem.seed is not None:
            call.set_dropout(*dropout.bounds(self.problem.seed, self.problem.dropout))
        return call

    def _bind_mask(self, call: Any, part: range | None) -> None:
        if self.ranges is not None:
            call.set_ranges(*self.ranges.address_from(0 if part is None else part.start))
        elif self.problem.mask is not None:
            queries = range(self.shape[2]) if part is None else part
            self.edges = self.problem.mask.strip(queries, self.problem.sizes)
            call.set_edges(self.edges.data_ptr(), broadcast_strides(self.edges))


class ReadEdges:
    """The edges whose mass is read, as ranges or, for some queries at a time, as bytes."""

    def __init__(self, inputs: Inputs, edges: Mask):
        self.inputs, self.edges = inputs, edges
        self.ranges = edges.ranges(inputs.shape[2], inputs.source, RANGES)
        self.bytes: Tensor | None = None

    def split(self, parts: list[range]) -> list[range]:
        """Parts of few enough queries to write their edges out."""
        if self.ranges is not None:
            return parts
        batch, head, _ = self.inputs.shape
        return split(parts, EDGES // (batch * head * self.inputs.source))

    def bind(self, call: Any, part: range) -> None:
        """Set the edges of these queries in a kernel call."""
        if self.ranges is not None:
            call.set_mass_ranges(*self.ranges.address_from(part.start))
            return
        self.bytes = self.edges.strip(part, self.inputs.problem.sizes)
        call.set_mass_edges(self.bytes.data_ptr(), broadcast_strides(self.bytes))


def split(parts: list[range], rows: int) -> list[range]:
    """Cut into parts of at most so many rows, in whole blocks of the kernel."""
    block = kernel._native.block()
    step = max(1, rows // block) * block
    return [part[i : i + step] for part in parts for i in range(0, len(part), step)]


def broadcast_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a tensor that broadcasts: 0 for an axis of size 1."""
    return tuple(s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True))


def new(*shape: int) -> Tensor:
    """An uninitialized float32 tensor for the kernel to fill."""
    return torch.empty(*shape, dtype=torch.float32)
