"""The walk round the ring: what each step sends, computes and receives.

In step d every rank deals with the ranks d before and d after it. Tensors for the next step travel
while this one is computed. No rank holds the tensors of more than two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.distributed.link import Link, Message
from clearhead.distributed.plan import Plan, Task

__all__ = ["Field", "Walk"]

# What a message holds; in a step each kind goes one way between two ranks.
QUERY, SOURCE, QUERY_RESULT, SOURCE_RESULT = range(4)
KINDS, TENSORS = 4, 16


class Field(NamedTuple):
    """The last axis and the dtype of a tensor (*batch, head, position, width)."""

    width: int
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> Field:
        """The field of a tensor."""
        return Field(x.shape[-1], x.dtype)


@dataclass
class Walk:
    """One pass over all rectangles that have a rank's queries or sources.

    All tensors are (*batch, head, position, width). `query` and `source` are this rank's own;
    `compute` returns tensors for the rows and for the sources of a task, as `query_fields` and
    `source_fields` say. `take_query` and `take_source` receive those of this rank's positions.
    """

    link: Link
    plan: Plan
    query: list[Tensor]
    source: list[Tensor]
    query_fields: list[Field]
    source_fields: list[Field]
    compute: Callable[[Task, list[Tensor], list[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]]
    take_query: Callable[[Task, Sequence[Tensor]], None]
    take_source: Callable[[Task, Sequence[Tensor]], None]

    def run(self) -> None:
        """Walk all steps; every rank of the group does so together."""
        steps: list[_Step] = []
        for number in range(1, self.link.world + 1):
            if number < self.link.world:
                steps.append(_Step(self, number))
                steps[-1].post()
            # The step before is computed while the tensors of this one travel.
            if number == 1:
                self._local()
            else:
                steps[number - 2].compute()
            if number > 2:
                steps[number - 3].settle()
        if self.link.world > 1:
            steps[-1].settle()

    def _local(self) -> None:
        task = self.plan.own(self.link.rank, self.link.rank)
        if task is not None:
            rows, sources = self.compute(task, self.of_query(task), self.of_source(task))
            self.take_query(task, rows)
            self.take_source(task, sources)

    def of_query(self, task: Task) -> list[Tensor]:
        """This rank's tensors of the rows and heads of a task."""
        heads = self.plan.shares.query_heads(task)
        return [x[..., heads, task.rows, :] for x in self.query]

    def of_source(self, task: Task) -> list[Tensor]:
        """This rank's tensors of the sources and heads of a task."""
        return [x[..., task.heads, :, :] for x in self.source]

    def like_query(self, task: Task, fields: Sequence[Field]) -> list[Tensor]:
        """Empty tensors for the rows of a task."""
        heads = self.plan.shares.query_heads(task)
        return self._empty(heads, task.rows.stop - task.rows.start, fields)

    def like_source(self, task: Task, fields: Sequence[Field]) -> list[Tensor]:
        """Empty tensors for the sources of a task."""
        return self._empty(task.heads, self.plan.shares.sources[task.source], fields)

    def _empty(self, heads: slice, positions: int, fields: Sequence[Field]) -> list[Tensor]:
        lead = (*self.query[0].shape[:-3], heads.stop - heads.start, positions)
        return [self.query[0].new_empty(*lead, width, dtype=dtype) for width, dtype in fields]


class _Step:
    """What a rank has to do with the rank `number` before it and the rank `number` after it."""

    def __init__(self, walk: Walk, number: int):
        self.walk, self.number, rank = walk, number, walk.link.rank
        self.before, self.after = (
            (rank - number) % walk.link.world,
            (rank + number) % walk.link.world,
        )
        plan = walk.plan
        # Computed here: this rank's rows, and rows that it takes from the rank before.
        self.own, self.taken = plan.own(rank, self.before), plan.taken(self.before, rank)
        # Computed there: rows of the rank after, and this rank's rows that it takes.
        self.theirs, self.lent = plan.own(self.after, rank), plan.taken(rank, self.after)
        self.sent: list[Message] = []
        self.arriving: dict[int, list[Message]] = {}

    def post(self) -> None:
        """Begin to receive what is computed here, and what is computed there; and to send."""
        walk = self.walk
        if self.own:
            fields = [Field.of(x) for x in walk.source]
            self._receive(SOURCE, self.before, walk.like_source(self.own, fields))
        if self.taken:
            fields = [Field.of(x) for x in walk.query]
            self._receive(QUERY, self.before, walk.like_query(self.taken, fields))
        if self.theirs:
            self._receive(
                SOURCE_RESULT, self.after, walk.like_source(self.theirs, walk.source_fields)
            )
            self._send(SOURCE, self.after, walk.of_source(self.theirs))
        if self.lent:
            self._receive(QUERY_RESULT, self.after, walk.like_query(self.lent, walk.query_fields))
            self._send(QUERY, self.after, walk.of_query(self.lent))

    def compute(self) -> None:
        """Compute what has arrived, and send the results that belong to others."""
        walk = self.walk
        if self.own:
            found = walk.compute(self.own, walk.of_query(self.own), self._arrived(SOURCE))
            walk.take_query(self.own, found[0])
            self._send(SOURCE_RESULT, self.before, found[1])
        if self.taken:
            found = walk.compute(self.taken, self._arrived(QUERY), walk.of_source(self.taken))
            walk.take_source(self.taken, found[1])
            self._send(QUERY_RESULT, self.before, found[0])

    def settle(self) -> None:
        """Take the results that others have computed, and let go of what was sent."""
        if self.lent:
            self.walk.take_query(self.lent, self._arrived(QUERY_RESULT))
        if self.theirs:
            self.walk.take_source(self.theirs, self._arrived(SOURCE_RESULT))
        for message in self.sent:
            message.wait()
        self.sent.clear()

    def _send(self, kind: int, peer: int, tensors: Sequence[Tensor]) -> None:
        for i, x in enumerate(tensors):
            tag = self._tag(kind, i)
            self.sent.append(self.walk.link.send(x.contiguous(), peer, tag, self.name))

    def _receive(self, kind: int, peer: int, tensors: Sequence[Tensor]) -> None:
        self.arriving[kind] = [
            self.walk.link.receive(x, peer, self._tag(kind, i), self.name)
            for i, x in enumerate(tensors)
        ]

    def _arrived(self, kind: int) -> list[Tensor]:
        return [message.wait() for message in self.arriving.pop(kind)]

    def _tag(self, kind: int, index: int) -> int:
        return (self.number * KINDS + kind) * TENSORS + index

    @property
    def name(self) -> str:
        """The step as errors name it."""
        return f"step {self.number} of {self.walk.link.world - 1}"
