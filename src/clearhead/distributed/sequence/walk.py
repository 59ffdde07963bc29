"""The walk round the ring: what each stage sends, computes and receives.

In step d every rank computes with the sources of the rank d before it. A step has several stages,
one for each piece of the sources: some heads and positions. The tensors of the next stage travel
while this one is computed, and no rank holds sources of more than two stages, except those that it
relays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.distributed.link import Link, Message
from clearhead.distributed.sequence.plan import Plan, Portion, SourcePiece, Task
from clearhead.masks import EMPTY, Mask
from clearhead.readings import cell_bounds

__all__ = ["Field", "Walk", "Work"]

# What a message holds.
QUERY, SOURCE, QUERY_RESULT, SOURCE_RESULT = range(4)
KINDS, TENSORS = 4, 8
# Sources are sent in pieces of about so many bytes, but in no more pieces than MOST.
PIECE, MOST = 1 << 18, 8
# The steps before and after the ring, as errors name them.
QUERIES, RESULTS = "the exchange of queries", "the return of results"


class Field(NamedTuple):
    """The last axis and the dtype of a tensor (*batch, head, position, width)."""

    width: int
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> Field:
        """The field of a tensor."""
        return Field(x.shape[-1], x.dtype)


class Work:
    """What a walk computes, and where its results go.

    All tensors are (*batch, head, position, width). `query` and `source` are this rank's own, and
    `sums` those that the tasks of its rows add to.
    """

    query: Sequence[Tensor]
    source: Sequence[Tensor]
    sums: Sequence[Tensor] = ()
    # The sums of a portion as they are sent home, and the results for sources.
    query_fields: Sequence[Field] = ()
    source_fields: Sequence[Field] = ()

    def begin(self, rows: Sequence[Tensor]) -> Sequence[Tensor]:
        """Make sums for the rows of another rank."""
        return ()

    def compute(
        self, task: Task, rows: list[Tensor], sources: list[Tensor], sums: list[Tensor]
    ) -> Sequence[Any]:
        """Add a task to the sums of its rows, and return the results for its sources."""
        raise NotImplementedError

    def take_query(self, heads: slice, rows: slice, found: Sequence[Tensor]) -> None:
        """Add what another rank computed for rows of this rank."""

    def take_source(self, piece: SourcePiece, found: Sequence[Tensor]) -> None:
        """Add results for sources of this rank."""


class Walk:
    """One pass over the tasks of a plan; all ranks of the group run it together."""

    def __init__(
        self, link: Link, plan: Plan, work: Work, mask: Mask | None, pieces: int | None = None
    ):
        self.link, self.plan, self.work, self.mask = link, plan, work, mask
        self.pieces = self._pieces() if pieces is None else pieces
        # Sources that are being relayed, and the stage after which they may be let go of.
        self.relayed: deque[tuple[int, Message]] = deque()
        self.guests = {id(p): _Guest(self, p) for p in plan.by_rank.get(link.rank, []) if p.away}
        self.lent = [_Lent(self, p) for p in plan.portions if p.away and p.home == link.rank]

    def _pieces(self) -> int:
        shares, source = self.plan.shares, self.work.source
        lead = source[0].shape[:-3].numel() * shares.source_heads * max(shares.sources)
        size = lead * sum(x.shape[-1] * x.element_size() for x in source)
        return max(1, min(size // PIECE, MOST))

    def run(self) -> None:
        """Walk all stages in which this rank has something to do."""
        for guest in self.guests.values():
            guest.post()
        for lent in self.lent:
            lent.lend()
        self._stages()
        for number, lent in enumerate(self.lent):
            for each in self.lent[number : number + 2]:
                each.post()
            lent.settle()
        given = [message for guest in self.guests.values() for message in guest.messages]
        for message in (*given, *(message for _, message in self.relayed)):
            message.wait()

    def _stages(self) -> None:
        count = self.link.world * self.pieces
        stages = [stage for stage in (_Stage(self, n) for n in range(count)) if stage.busy]
        for number, stage in enumerate(stages):
            following = stages[number + 1] if number + 1 < len(stages) else None
            for each in ([] if number else [stage]) + ([following] if following else self.lent[:1]):
                each.post()
            stage.compute()
            self._give(following.number if following else count)
            for before in stages[number - 1 : number]:
                before.settle()
            if number == 1:
                # These have arrived by now, or will soon.
                for lent in self.lent:
                    lent.release()
        for last in stages[-1:]:
            last.settle()

    def _give(self, following: int) -> None:
        """Send the sums of rows home that no later stage adds to."""
        for guest in self.guests.values():
            if not guest.given and (guest.steps + 1) * self.pieces <= following:
                guest.give()

    def piece(self, at: int, source: int, number: int) -> SourcePiece | None:
        """A piece of the sources of a rank that another rank needs; None where it needs none."""
        heads = self.plan.needed.get((at, source))
        if heads is None:
            return None
        first = _cuts(heads, self.pieces)
        second = _cuts(slice(0, self.plan.shares.sources[source]), self.pieces // len(first))
        if number >= len(first) * len(second):
            return None
        piece = SourcePiece(first[number // len(second)], second[number % len(second)])
        # A relay would need the piece even where it computes nothing with it.
        needed = source in self.plan.relayed or self._allows(at, source, piece)
        return piece if needed else None

    def _allows(self, at: int, source: int, piece: SourcePiece) -> bool:
        """Whether the rank has tasks with the piece in which the mask allows an edge."""
        for _, task in self.plan.tasks(at, source, piece):
            _, row, column, sizes = self.plan.shares.corner(task)
            rows = range(row, row + task.rows.stop - task.rows.start)
            columns = range(column, column + task.columns.stop - task.columns.start)
            if self.mask is None or self.mask.block(rows, columns, *sizes[2:]) != EMPTY:
                return True
        return False

    def of_query(self, portion: Portion, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's tensors at the rows and heads of a portion."""
        heads = self.plan.shares.query_heads(portion.heads)
        return [x[..., heads, portion.rows, :] for x in tensors]

    def empty(self, heads: slice, positions: int, fields: Sequence[Field]) -> list[Tensor]:
        """Tensors to receive into."""
        like = self.work.query[0]
        lead = (*like.shape[:-3], heads.stop - heads.start, positions)
        return [like.new_empty(*lead, width, dtype=dtype) for width, dtype in fields]

    def empty_piece(self, piece: SourcePiece, fields: Sequence[Field]) -> list[Tensor]:
        """Tensors to receive a piece of sources, or results for it, into."""
        return self.empty(piece.heads, piece.columns.stop - piece.columns.start, fields)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int, step: str) -> list[Message]:
        """Begin to send tensors."""
        return [
            self.link.send(x.contiguous(), peer, tag * TENSORS + i, step)
            for i, x in enumerate(tensors)
        ]

    def receive(self, tensors: Sequence[Tensor], peer: int, tag: int, step: str) -> list[Message]:
        """Begin to receive into tensors."""
        return [self.link.receive(x, peer, tag * TENSORS + i, step) for i, x in enumerate(tensors)]

    def portion_tag(self, portion: Portion, kind: int) -> int:
        """A tag for the messages about a portion; those of stages have other kinds."""
        return self.plan.number(portion) * KINDS + kind


class _Guest:
    """Rows of another rank that this one computes: they arrive once, and their sums go back."""

    def __init__(self, walk: Walk, portion: Portion):
        self.walk, self.portion = walk, portion
        self.heads = walk.plan.shares.query_heads(portion.heads)
        self.rows: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.messages: list[Message] = []
        self.given = False
        # The last step in which they are computed.
        world = walk.link.world
        self.steps = max((portion.at - source) % world for source in portion.sources)

    def post(self) -> None:
        """Begin to receive the rows."""
        walk, rows = self.walk, self.portion.rows
        fields = [Field.of(x) for x in walk.work.query]
        into = walk.empty(self.heads, rows.stop - rows.start, fields)
        tag = walk.portion_tag(self.portion, QUERY)
        self.messages = walk.receive(into, self.portion.home, tag, QUERIES)

    def ready(self) -> tuple[list[Tensor], list[Tensor]]:
        """The rows, which have arrived, and their sums."""
        if not self.rows:
            self.rows = [message.wait() for message in self.messages]
            self.sums = list(self.walk.work.begin(self.rows))
        return self.rows, self.sums

    def give(self) -> None:
        """Begin to send the sums home."""
        walk, fields = self.walk, self.walk.work.query_fields
        sums = [x.to(field.dtype) for x, field in zip(self.ready()[1], fields, strict=True)]
        self.rows, self.sums, self.given = [], [], True
        tag = walk.portion_tag(self.portion, QUERY_RESULT)
        self.messages = walk.send(sums, self.portion.home, tag, RESULTS)


class _Lent:
    """Rows of this rank that another one computes."""

    def __init__(self, walk: Walk, portion: Portion):
        self.walk, self.portion = walk, portion
        self.heads = walk.plan.shares.query_heads(portion.heads)
        self.sent: list[Message] = []
        self.arriving: list[Message] = []

    def lend(self) -> None:
        """Begin to send the rows."""
        tensors = self.walk.of_query(self.portion, self.walk.work.query)
        tag = self.walk.portion_tag(self.portion, QUERY)
        self.sent = self.walk.send(tensors, self.portion.at, tag, QUERIES)

    def post(self) -> None:
        """Begin to receive their sums."""
        walk, portion = self.walk, self.portion
        if not self.arriving:
            rows = portion.rows.stop - portion.rows.start
            into = walk.empty(self.heads, rows, walk.work.query_fields)
            tag = walk.portion_tag(portion, QUERY_RESULT)
            self.arriving = walk.receive(into, portion.at, tag, RESULTS)

    def release(self) -> None:
        """Let go of what was sent."""
        for message in self.sent:
            message.release()

    def settle(self) -> None:
        """Add what the other rank has computed."""
        self.release()
        found = [message.wait() for message in self.arriving]
        self.arriving = []
        self.walk.work.take_query(self.heads, self.portion.rows, found)


class _Stage:
    """One piece of the sources of the rank that is some steps before this one."""

    def __init__(self, walk: Walk, number: int):
        self.walk, self.number, world = walk, number, walk.link.world
        self.step, self.piece = divmod(number, walk.pieces)
        self.rank = walk.link.rank
        self.before, self.after = (self.rank - self.step) % world, (self.rank + self.step) % world
        self.own = walk.piece(self.rank, self.before, self.piece)
        self.theirs = walk.piece(self.after, self.rank, self.piece)
        self.sent: list[Message] = []
        self.arriving: list[Message] = []
        self.results: list[Message] = []

    @property
    def busy(self) -> bool:
        """Whether there is something to compute, or to exchange with the rank after."""
        return bool(self.own or (self.theirs and self.step))

    def post(self) -> None:
        """Begin to receive what is computed next, and to send to the rank after."""
        walk, plan = self.walk, self.walk.plan
        if self.step == 0:
            return
        if self.own:
            fields = [Field.of(x) for x in walk.work.source]
            into = walk.empty_piece(self.own, fields)
            sender = plan.senders[self.rank, self.before]
            self.arriving = walk.receive(into, sender, self._tag(SOURCE), self.name)
        if self.theirs:
            into = walk.empty_piece(self.theirs, walk.work.source_fields)
            self.results = walk.receive(into, self.after, self._tag(SOURCE_RESULT), self.name)
            if plan.senders[self.after, self.rank] == self.rank:
                sources = self._mine(self.theirs)
                self.sent += walk.send(sources, self.after, self._tag(SOURCE), self.name)

    def _mine(self, piece: SourcePiece) -> list[Tensor]:
        return [x[..., piece.heads, piece.columns, :] for x in self.walk.work.source]

    def compute(self) -> None:
        """Compute what has arrived, and send the results for its sources home."""
        if not self.own:
            return
        walk = self.walk
        sources = [message.wait() for message in self.arriving]
        self.arriving.clear()
        sources = sources if self.step else self._mine(self.own)
        self._relay(sources)
        found = self._computed(sources)
        if self.step == 0:
            walk.work.take_source(self.own, found)
        else:
            fields = zip(found, walk.work.source_fields, strict=True)
            found = [x.to(field.dtype) for x, field in fields]
            self.sent += walk.send(found, self.before, self._tag(SOURCE_RESULT), self.name)

    def _relay(self, sources: list[Tensor]) -> None:
        """Send the sources to the next rank, where this one relays them."""
        walk, world = self.walk, self.walk.link.world
        receiver = (self.rank + 1) % world
        if self.step and walk.plan.senders.get((receiver, self.before)) == self.rank:
            due = self.number + walk.pieces
            tag = self._tag(SOURCE, due)
            for message in walk.send(sources, receiver, tag, self._name(self.step + 1)):
                walk.relayed.append((due, message))

    def _computed(self, sources: list[Tensor]) -> list[Any]:
        """Compute all tasks with these sources, and add up their results for the sources."""
        walk, shares, piece = self.walk, self.walk.plan.shares, self.own
        assert piece is not None
        tasks = list(walk.plan.tasks(self.rank, self.before, piece))
        alone = len(tasks) == 1 and tasks[0][1].heads == piece.heads
        found: list[Any] = [
            x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
            for x in sources[: 0 if alone else len(walk.work.source_fields)]
        ]
        for portion, task in tasks:
            rows, sums = self._rows(portion)
            part = shares.query_heads(_within(task.heads, portion.heads))
            inside = _within(task.heads, piece.heads)
            results = walk.work.compute(
                task, [x[..., part, :, :] for x in rows], [x[..., inside, :, :] for x in sources],
                [x[..., part, :, :] for x in sums],
            )  # fmt: skip
            if alone:
                return list(results)
            for total, x in zip(found, results, strict=True):
                total[..., inside, :, :] += x
        return found

    def _rows(self, portion: Portion) -> tuple[list[Tensor], list[Tensor]]:
        walk = self.walk
        if portion.away:
            return walk.guests[id(portion)].ready()
        return tuple(walk.of_query(portion, x) for x in (walk.work.query, walk.work.sums))  # type: ignore[return-value]

    def settle(self) -> None:
        """Take the results that others have computed, and let go of what was sent."""
        if self.theirs and self.step:
            self.walk.work.take_source(self.theirs, [x.wait() for x in self.results])
        relayed = self.walk.relayed
        while relayed and relayed[0][0] <= self.number:
            self.sent.append(relayed.popleft()[1])
        for message in self.sent:
            message.wait()
        self.sent.clear()
        self.results.clear()

    def _tag(self, kind: int, number: int | None = None) -> int:
        return (self.number if number is None else number) * KINDS + kind

    @property
    def name(self) -> str:
        """The step as errors name it."""
        return self._name(self.step)

    def _name(self, step: int) -> str:
        return f"step {step} of {self.walk.link.world - 1}"


def _cuts(part: slice, many: int) -> list[slice]:
    """A slice in so many parts, or as many as it has elements."""
    bounds = cell_bounds(part.stop - part.start, max(many, 1))
    return [slice(part.start + a, part.start + b) for a, b in pairwise(bounds)] or [part]


def _within(part: slice, whole: slice) -> slice:
    """A part of a slice, counted from its start."""
    return slice(part.start - whole.start, part.stop - whole.start)
