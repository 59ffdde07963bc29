"""Which rank computes which part of the map, and who sends what: all ranks make the same plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from clearhead._core import Sizes
from clearhead.attention import Corner
from clearhead.distributed.section import Section
from clearhead.masks import FULL, Mask

__all__ = ["Costs", "Plan", "Portion", "Shares", "SourcePiece", "Task", "at_home"]


class Task(NamedTuple):
    """A rectangle: the ranks of its queries and of its sources, and which heads and rows."""

    query: int
    source: int
    heads: slice  # source heads, with all query heads that share them
    rows: slice  # counted from the first query of the rank
    columns: slice  # counted from the first source of the other rank


class SourcePiece(NamedTuple):
    """Some heads and positions of the sources of a rank, which are sent at once."""

    heads: slice
    columns: slice


class Portion(NamedTuple):
    """Some heads and rows of the rank `home`, and the rank that computes them.

    They are computed against the sources of some ranks only; the rest is in other portions.
    """

    home: int
    at: int
    heads: slice
    rows: slice
    sources: frozenset[int]

    @property
    def away(self) -> bool:
        """Whether another rank computes it: queries travel there, and what it computes back."""
        return self.home != self.at


class Costs(NamedTuple):
    """Bytes of one position and one source head, with all query heads that share it."""

    query: float  # to the rank that computes
    result: float  # back to the rank of the queries
    source: float


@dataclass(frozen=True)
class Shares:
    """The sizes of the whole map, and how the positions are split over the ranks."""

    sizes: Sizes
    source_heads: int
    queries: tuple[int, ...]  # how many queries each rank has
    sources: tuple[int, ...]

    @property
    def ranks(self) -> range:
        """The numbers of the ranks."""
        return range(len(self.queries))

    @property
    def group(self) -> int:
        """How many query heads share one source head."""
        return self.sizes.head // max(self.source_heads, 1)

    def query_heads(self, heads: slice) -> slice:
        """The query heads that share some source heads."""
        return slice(heads.start * self.group, heads.stop * self.group)

    def whole(self, query: int, source: int) -> Task:
        """The task of all queries of one rank and all sources of another."""
        heads, rows = slice(0, self.source_heads), slice(0, self.queries[query])
        return Task(query, source, heads, rows, slice(0, self.sources[source]))

    def corner(self, task: Task) -> Corner:
        """Where the task lies in the whole map."""
        query = sum(self.queries[: task.query]) + task.rows.start
        source = sum(self.sources[: task.source]) + task.columns.start
        return Corner(task.heads.start * self.group, query, source, self.sizes)

    def mask(self, mask: Mask | None, task: Task) -> Mask | None:
        """The mask of the task; None where it allows every edge."""
        heads, rows, sources = (_length(x) for x in (task.heads, task.rows, task.columns))
        if mask is None:
            return None
        section = Section(mask, self.corner(task), heads * self.group, rows, sources)
        full = section.block(range(rows), range(sources), rows, sources) == FULL
        return None if full else section


@dataclass(frozen=True)
class Plan:
    """What each rank computes. Every edge of the map that the mask allows is in one portion."""

    shares: Shares
    portions: tuple[Portion, ...]
    costs: Costs

    @cached_property
    def by_rank(self) -> dict[int, list[Portion]]:
        """The portions that each rank computes, its own before those of others."""
        found = defaultdict(list)
        for portion in sorted(self.portions, key=lambda portion: portion.away):
            found[portion.at].append(portion)
        return found

    @cached_property
    def needed(self) -> dict[tuple[int, int], slice]:
        """The source heads that a rank computes with, by (rank, rank of the sources)."""
        found: dict[tuple[int, int], slice] = {}
        for portion in self.portions:
            for source in portion.sources:
                heads = found.get((portion.at, source), portion.heads)
                found[portion.at, source] = slice(
                    min(heads.start, portion.heads.start), max(heads.stop, portion.heads.stop)
                )
        return found

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {id(portion): number for number, portion in enumerate(self.portions)}

    def number(self, portion: Portion) -> int:
        """The number of a portion among all of the plan."""
        return self._numbers[id(portion)]

    def tasks(self, rank: int, source: int, piece: SourcePiece) -> Iterator[tuple[Portion, Task]]:
        """What a rank computes with a piece of another rank's sources."""
        for portion in self.by_rank.get(rank, []):
            start = max(piece.heads.start, portion.heads.start)
            heads = slice(start, min(piece.heads.stop, portion.heads.stop))
            if source in portion.sources and heads.start < heads.stop:
                yield portion, Task(portion.home, source, heads, portion.rows, piece.columns)

    @cached_property
    def relayed(self) -> set[int]:
        """The ranks whose sources are relayed by others."""
        return {source for (_, source), sender in self.senders.items() if sender != source}

    @cached_property
    def senders(self) -> dict[tuple[int, int], int]:
        """Who sends the sources, by (receiver, rank of the sources): their rank, or a relay.

        The rank before the receiver has had the same sources one step earlier, and relays them
        where their own rank would send more than a ring makes it send.
        """
        senders = {(at, source): source for at, source in self.needed if at != source}
        sent, world = self._sent_besides(), len(self.shares.ranks)
        receivers = defaultdict(list)
        for at, source in senders:
            sent[source] += self._size((at, source))
            if self._may_relay(at, source):
                receivers[source].append(at)
        least = (world - 1) * max(map(self._block, self.shares.ranks))
        while max(sent) > least:
            busiest = sent.index(max(sent))
            relays = [(sent[at - 1], at) for at in receivers[busiest]]
            load, at = min(relays, default=(0.0, 0))
            if not relays or load + self._size((at, busiest)) >= sent[busiest]:
                break
            receivers[busiest].remove(at)
            senders[at, busiest] = (at - 1) % world
            sent[busiest] -= self._size((at, busiest))
            sent[at - 1] += self._size((at, busiest))
        return senders

    def _may_relay(self, at: int, source: int) -> bool:
        before = (at - 1) % len(self.shares.ranks)
        return before != source and self.needed.get((before, source)) == self.needed[at, source]

    def _size(self, transfer: tuple[int, int]) -> float:
        heads = self.needed[transfer]
        return (heads.stop - heads.start) * self.shares.sources[transfer[1]] * self.costs.source

    def _block(self, rank: int) -> float:
        return self.shares.source_heads * self.shares.sources[rank] * self.costs.source

    def _sent_besides(self) -> list[float]:
        """What each rank sends of queries and of results."""
        sent = [0.0] * len(self.shares.ranks)
        for portion in self.portions:
            if portion.away:
                size = _length(portion.heads) * _length(portion.rows)
                sent[portion.home] += size * self.costs.query
                sent[portion.at] += size * self.costs.result
        return sent

    def sent(self) -> list[float]:
        """The bytes that each rank sends in a forward pass."""
        sent = self._sent_besides()
        for transfer, sender in self.senders.items():
            sent[sender] += self._size(transfer)
        return sent


def at_home(pairs: Iterable[tuple[int, int]], shares: Shares) -> list[Portion]:
    """Every rank computes its own queries, against the sources that they have edges with."""
    sources = defaultdict(set)
    for query, source in pairs:
        sources[query].add(source)
    return [
        Portion(rank, rank, *shares.whole(rank, rank)[2:4], frozenset(sources[rank]))
        for rank in shares.ranks
        if sources[rank]
    ]


def _length(part: slice) -> int:
    return part.stop - part.start
