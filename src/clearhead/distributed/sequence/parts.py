"""Readings over ranks: a second walk, in which the log-sum-exp of the whole rows is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from clearhead import attention
from clearhead.distributed.sequence.balance import make_plan
from clearhead.distributed.sequence.plan import Plan, SourcePiece, Task
from clearhead.distributed.sequence.ring import Call
from clearhead.distributed.sequence.walk import Field, Walk, Work
from clearhead.readings import Blocks, PerQuery, Reading

__all__ = ["finished", "gradients", "merged"]


def merged(call: Call, read: tuple[Reading, ...], lse: Tensor) -> list[Any]:
    """Return the part of each reading of this rank's rows, or of all rows where it sums over them.

    `lse` is the log-sum-exp of this rank's rows.
    """
    work, plan, rank = _Parts(call, read, lse), _plan(call), call.link.rank
    with torch.no_grad():
        if rank not in plan.by_rank:
            # A rank without edges has a part too.
            task = plan.shares.whole(rank, rank)
            work.compute(task, [call.problem.query], [call.problem.key], [])
        Walk(call.link, plan, work, call.problem.mask, pieces=1).run()
        for i in _sums(work.parts):
            step = "the merge of the readings"
            work.parts[i] = call.link.fold(work.parts[i], read[i].merge, step)
    return [_own_rows(call, part) for part in work.parts]


def finished(call: Call, read: tuple[Reading, ...], parts: Sequence[Any]) -> list[Any]:
    """Return the values of readings from their parts."""
    return [reading.finish(part) for reading, part in zip(read, parts, strict=True)]


def gradients(
    call: Call, read: tuple[Reading, ...], parts: Sequence[Any], lse: Tensor, given: Sequence[Any]
) -> list[Tensor | None]:
    """Return the gradients of query, key, bias and log-sum-exp, from those of the values.

    The gradient of a value that is whole on every rank is the sum of those of all ranks.
    """
    step = "the backward pass of the readings"
    asked = any(x is not None for x in pytree.tree_leaves(given))
    if not any(call.link.gather(asked, step)):
        return [None] * 4
    grads = [attention.part_grad(*each) for each in zip(read, parts, given, strict=True)]
    for i in _sums(parts):
        leaves = call.link.fold(_filled(grads[i], parts[i]), _added, step)
        grads[i] = pytree.tree_unflatten(leaves, pytree.tree_structure(parts[i]))
    work = _Gradients(call, read, lse.to(call.problem.dtype), grads)
    Walk(call.link, _plan(call), work, call.problem.mask, pieces=1).run()
    return [*work.sums, work.key, work.bias, work.to_lse]


def _plan(call: Call) -> Plan:
    """A reading may compare heads: each rank reads all heads of its own rows."""
    return make_plan(call.problem.mask, call.plan.shares, call.plan.costs, balance=False)


class _Parts(Work):
    """The parts of the readings, added up."""

    def __init__(self, call: Call, read: tuple[Reading, ...], lse: Tensor):
        self.call, self.read, self.lse = call, read, lse
        self.query, self.source = [call.problem.query], [call.problem.key]
        self.parts: list[Any] = [None] * len(read)

    def compute(
        self, task: Task, rows: list[Tensor], sources: list[Tensor], sums: list[Tensor]
    ) -> Sequence[Tensor]:
        problem = self.call.part(task, rows[0], sources[0], sources[0][..., :0])
        found = attention.parts(problem, self.read, self.lse)
        for i, (reading, part) in enumerate(zip(self.read, found, strict=True)):
            known = self.parts[i]
            self.parts[i] = part if known is None else reading.merge(known, part)
        return ()


class _Gradients(Work):
    """The gradients of one rank's queries, keys and bias, from those of the readings' parts."""

    def __init__(self, call: Call, read: tuple[Reading, ...], lse: Tensor, grads: list[Any]):
        problem, dtype = call.problem, call.problem.dtype
        self.call, self.read, self.lse, self.grads = call, read, lse, grads
        self.query, self.source = [problem.query], [problem.key]
        self.source_fields = [Field.of(problem.key)]
        self.sums = [torch.zeros_like(problem.query, dtype=dtype)]
        self.key, self.to_lse = torch.zeros_like(problem.key, dtype=dtype), torch.zeros_like(lse)
        bias, self.bias = problem.bias, None
        if bias is not None and bias.requires_grad:
            self.bias = torch.zeros_like(bias, dtype=dtype)
        # Of the pieces of a map, how many have been met.
        self.count = 0

    def compute(
        self, task: Task, rows: list[Tensor], sources: list[Tensor], sums: list[Tensor]
    ) -> Sequence[Any]:
        problem = self.call.part(task, rows[0], sources[0], sources[0][..., :0])
        found: Any
        found, self.count = attention.parts_gradient(
            problem, self.read, self.lse, self.grads, self.count
        )
        query, key, bias, lse = found
        sums[0] += query
        self.to_lse += lse
        if self.bias is not None:
            self.call.cut(self.bias, task).add_(bias)
        return (key,)

    def take_source(self, piece: SourcePiece, found: Sequence[Tensor]) -> None:
        self.key[..., piece.heads, piece.columns, :] += found[0]


def _sums(parts: Sequence[Any]) -> list[int]:
    """Which parts have no rows of their own: the ranks merge them."""
    return [i for i, part in enumerate(parts) if not isinstance(part, (PerQuery, Blocks))]


def _own_rows(call: Call, part: Any) -> Any:
    """The pieces of a map of this rank's rows, counted from its first row."""
    if not isinstance(part, Blocks):
        return part
    rank, queries = call.link.rank, call.plan.shares.queries
    first = sum(queries[:rank])
    pieces = tuple((rows - first, sources, x) for rows, sources, x in part.pieces)
    return Blocks(pieces, queries[rank], part.source)


def _filled(grad: Any, part: Any) -> list[Tensor]:
    """The gradients of the tensors of a part, 0 where there is none."""
    pairs = zip(pytree.tree_leaves(grad), pytree.tree_leaves(part), strict=True)
    return [torch.zeros_like(x) if g is None else g for g, x in pairs]


def _added(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(left, right, strict=True)]
