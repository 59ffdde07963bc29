"""The records of several ranks joined to one sequence: heads, samples or positions side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from clearhead import readings
from clearhead._core import Sizes, value_error
from clearhead.distributed.gathering.edges import joined_mask
from clearhead.recording import Record, Seen, Share

__all__ = ["AXES", "joined", "reported_axis"]

# Where the axes lie in the tensors of a value, and in the sizes of a record.
AXES = {"batch": 0, "head": 1, "position": 2}
# How the notes begin that say which share a rank has.
_OF_SHARES = {"head": "tensor parallel: ", "position": "sequence parallel: "}
_PER_QUERY = (
    readings.Weights | readings.Scores | readings.TopK | readings.LogSumExp | readings.MaxScore
    | readings.Entropy | readings.Mass | readings.Distance
)  # fmt: skip


def reported_axis(documents: Sequence[dict[str, Any]]) -> str:
    """The axis on which the ranks hold different shares, from what `outlined` gives of each."""
    every = [
        {key: [tuple(share) for share in x["shares"]] for key, x in _keyed(document["records"])}
        for document in documents
    ]
    keys = {key for each in every for key in each}
    for along in ("head", "position"):
        told = [{tuple(_of(each.get(key, ()), along)) for each in every} for key in keys]
        if any(len(shares) > 1 for shares in told):
            return along
    if keys and all(_of(shares, "batch") for each in every for shares in each.values()):
        return "batch"
    raise value_error(
        "along", "is needed: the ranks do not say of what they hold shares",
        hint="along='batch' where each rank ran its own samples; 'head' or 'position' where the "
        "model splits those",
    )  # fmt: skip


def joined(seen: Sequence[Seen], along: str) -> Seen:
    """Join the records of the ranks, call by call."""
    whole = Seen()
    by_key = [
        {key: each[at] for at, (key, _) in enumerate(_keyed(list(map(vars, each))))}
        for each in seen
    ]
    for key in dict.fromkeys(key for each in by_key for key in each):
        found = {rank: each[key] for rank, each in enumerate(by_key) if key in each}
        whole._records.append(_Joining.of(found, len(seen), along).record(whole.notes))
    for note in dict.fromkeys(note for each in seen for note in each.notes):
        ranks = [rank for rank, each in enumerate(seen) if note in each.notes]
        if not note.startswith(_OF_SHARES.get(along, "\n")):
            named = "" if len(ranks) == len(seen) else f"rank {', '.join(map(str, ranks))}: "
            whole.notes.append(named + note)
    return whole


def _keyed(records: Sequence[dict[str, Any]]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Give each record what names its call; forwards and generations are counted apart."""
    met: Counter[Any] = Counter()
    for record in records:
        name = tuple(record[x] for x in ("layer", "module", "call"))
        yield (*name, met[name]), record
        met[name] += 1


def _of(shares: Sequence[Any], along: str) -> list[Any]:
    return [share for share in shares if share[0] == along]


@dataclass(frozen=True)
class _Joining:
    """The records that the ranks have of one call, in the order of their shares."""

    along: str
    records: list[Record]
    shares: list[Share] | None  # None where the ranks do not say which share they have

    @staticmethod
    def of(found: dict[int, Record], world: int, along: str) -> _Joining:
        """Check the records of a call, by rank, and put them in order."""
        name = f"layer {next(iter(found.values())).layer}"
        shares = {rank: _of(record.shares, along) for rank, record in found.items()}
        told = all(shares.values()) and all(x[0].start is not None for x in shares.values())
        if len(found) < world and not (told and along == "head"):
            missing = [rank for rank in range(world) if rank not in found]
            raise value_error("seen", "has the same calls on all ranks", got=f"no {name} on rank "
                              f"{missing[0]}", hint="watch the same layers and calls")  # fmt: skip
        if not told:
            return _Joining(along, list(found.values()), None)
        order = sorted(found, key=lambda rank: shares[rank][0].start)
        _check_whole([shares[rank][0] for rank in order], order, len(found) == world, name)
        return _Joining(along, [found[x] for x in order], [shares[x][0] for x in order])

    def record(self, notes: list[str]) -> Record:
        """Join them."""
        first = self.records[0]
        self._check_equal()
        sizes = self._sizes()
        mask = joined_mask([(x.mask, x.sizes) for x in self.records], self._mask_axis, sizes, notes)
        return replace(
            first, value=self._value(), mask=mask, check=self._check, heads=self._heads(),
            queries=self._queries(), sizes=sizes, source_heads=self._source_heads(),
            shares=tuple(share for share in first.shares if share.along != self.along),
        )  # fmt: skip

    def _check_equal(self) -> None:
        """Raise where the records are of different calls, or of different readings."""
        at, own = AXES[self.along], {"head": "heads", "position": "queries"}.get(self.along)
        names = [x for x in ("kind", "prompt", "scale", "heads", "queries") if x != own]
        for record in self.records[1:]:
            pairs = [
                (name, getattr(self.records[0], name), getattr(record, name)) for name in names
            ]
            pairs.append(("read", repr(self.records[0].read), repr(record.read)))
            kept = [
                tuple(x.sizes)[:at] + tuple(x.sizes)[at + 1 :] for x in (self.records[0], record)
            ]
            for name, one, other in [*pairs, ("sizes", *kept)]:
                if one != other:
                    where = f"layer {record.layer}: {one} on one rank, {other} on another"
                    raise value_error(
                        "seen", f"has records of equal {name} on all ranks", got=where
                    )

    def _sizes(self) -> Sizes:
        first = self.records[0].sizes
        if self.shares is not None:
            return first
        whole = list(first)
        whole[AXES[self.along]] = sum(x.sizes[AXES[self.along]] for x in self.records)
        return Sizes(*whole)

    @property
    def _mask_axis(self) -> int | None:
        """The axis on which the masks stand side by side; None where each is of the whole."""
        return AXES[self.along] if self.shares is None else None

    @property
    def _check(self) -> float | None:
        return max((x.check for x in self.records if x.check is not None), default=None)

    def _heads(self) -> tuple[int, ...]:
        if self.along != "head":
            return self.records[0].heads
        starts = [0] * len(self.records)
        if self.shares is None:
            starts = [0, *accumulate(x.sizes.head for x in self.records)]
        pairs = zip(starts, self.records, strict=False)
        return tuple(start + head for start, record in pairs for head in record.heads)

    def _queries(self) -> tuple[int, ...] | None:
        if self.along != "position" or self.shares is None:
            return self.records[0].queries
        found = [query for x in self.records for query in x.queries or ()]
        return None if found == list(range(self.records[0].sizes.query)) else tuple(found)

    def _source_heads(self) -> int | None:
        each = [record.source_heads for record in self.records]
        if self.along != "head" or self.shares is not None:
            return each[0]
        return None if None in each else sum(x or 0 for x in each)

    def _value(self) -> Any:
        first, values = self.records[0], [record.value for record in self.records]
        if not isinstance(first.read, tuple):
            return self._joined(first.read, values)
        parts = zip(first.read, zip(*values, strict=True), strict=True)
        return tuple(self._joined(reading, each) for reading, each in parts)

    def _joined(self, reading: Any, values: Sequence[Any]) -> Any:
        """Join the values of one reading."""
        if isinstance(reading, readings.Overlap) and self.along == "head":
            raise value_error("read", "has no pair of heads that lie on two ranks",
                              got=repr(reading), hint="read Weights()")  # fmt: skip
        if self.along != "position" or isinstance(reading, _PER_QUERY):
            axis = AXES[self.along]
            return pytree.tree_map(lambda *each: torch.cat(each, axis), *values)
        if self.shares is not None and reading is not None:
            return values[0]  # `distributed.attend` gives it whole on every rank
        if isinstance(reading, readings.Received):
            return sum(values[1:], values[0])
        raise value_error("read", "cannot be joined along the positions", got=repr(reading))


def _check_whole(shares: list[Share], ranks: list[int], every: bool, name: str) -> None:
    """Raise where shares overlap, or where some are on none of the ranks."""
    ends = [(x.start or 0) + x.size for x in shares]
    for (rank, other), end, share in zip(pairwise(ranks), ends, shares[1:], strict=False):
        if (share.start or 0) < end:
            raise value_error(
                "group", f"has each {share.along} of {name} on one rank",
                got=f"the same ones on the ranks {rank} and {other}",
                hint="gather over the group that splits the model, then over that of the samples",
            )  # fmt: skip
    if every and sum(x.size for x in shares) != shares[0].whole:
        got = f"{sum(x.size for x in shares)} of {shares[0].whole}"
        raise value_error("group", f"has every {shares[0].along} of {name}", got=got)
