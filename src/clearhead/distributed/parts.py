"""Readings over ranks: a second walk, in which the log-sum-exp of the whole rows is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from clearhead import attention
from clearhead.distributed.plan import Task, make_plan
from clearhead.distributed.ring import Call
from clearhead.distributed.walk import Walk
from clearhead.readings import Blocks, PerQuery, Reading

__all__ = ["values_of"]


def values_of(call: Call, read: tuple[Reading, ...], lse: Tensor) -> list[Any]:
    """Return the values of readings: of this rank's rows, or whole where they sum over rows."""
    shares, found = call.plan.shares, [[] for _ in read]
    # A reading may compare heads: each rank reads all heads of its own rows.
    plan = make_plan(call.problem.mask, shares, balance=False)

    def compute(task: Task, rows: list[Tensor], sources: list[Tensor]) -> Any:
        problem = call.part(task, rows[0], sources[0], sources[0][..., :0])
        parts = attention.parts(problem, read, lse)
        for each, part in zip(found, parts, strict=True):
            each.append(part)
        return (), ()

    def take(task: Task, found: Sequence[Tensor]) -> None:
        """The parts stay on the rank of the rows."""

    with torch.no_grad():
        rank = call.link.rank
        if plan.own(rank, rank) is None:
            # A rank without edges has a part too.
            task = shares.whole(rank, rank)
            compute(task, [call.problem.query], [call.problem.key])
        Walk(
            call.link, plan, [call.problem.query], [call.problem.key], [], [], compute, take, take
        ).run()
        merged = [reduce(r.merge, parts) for r, parts in zip(read, found, strict=True)]
        return _finished(call, read, merged)


def _finished(call: Call, read: tuple[Reading, ...], parts: list[Any]) -> list[Any]:
    """Merge over the ranks what has no rows of its own."""
    sums = [i for i, part in enumerate(parts) if not isinstance(part, (PerQuery, Blocks))]
    if sums:
        told = call.link.gather([parts[i] for i in sums], "the merge of the readings")
        for at, i in enumerate(sums):
            parts[i] = reduce(read[i].merge, (each[at] for each in told))
    return [r.finish(_own_rows(call, part)) for r, part in zip(read, parts, strict=True)]


def _own_rows(call: Call, part: Any) -> Any:
    """The pieces of a map of this rank's rows, counted from its first row."""
    if not isinstance(part, Blocks):
        return part
    rank, queries = call.link.rank, call.plan.shares.queries
    first = sum(queries[:rank])
    pieces = tuple((rows - first, sources, x) for rows, sources, x in part.pieces)
    return Blocks(pieces, queries[rank], part.source)
