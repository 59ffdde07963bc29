"""What watching gives: records and the sequence of them, in memory and on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from clearhead._core import Sizes
from clearhead._display import mimebundle
from clearhead.masks import Mask
from clearhead.readings import Reading
from clearhead.recording import packed, store
from clearhead.recording.shares import Share
from clearhead.recording.table import table

__all__ = ["Record", "Seen", "load", "outlined", "restored"]


@dataclass(frozen=True, eq=False)
class Record:
    """What was seen of one attention call.

    `value` mirrors `read` as `attend` does; its tensors have batch and head axes. `layer` counts
    the attention modules in order of first call, `call` the calls of this one. `mask` is None where
    every query may attend to every source. `check` is the largest difference of sampled rows,
    recomputed, from the model's own output (None under dropout, and where heads are cut). `read`
    is what was read, as `watch` received it.

    Where a model is split over ranks, `sizes` are those of the whole, and `heads` and `queries` the
    numbers of what is here. `shares` says so too, and `clearhead.distributed.gather` joins them.

    Until it is first read, `value` is packed in fewer bytes than its tensors take.
    """

    value: Any
    layer: int
    module: str
    call: int
    kind: str
    mask: Mask | None
    scale: float | None
    check: float | None
    how: str
    heads: tuple[int, ...]
    queries: tuple[int, ...] | None
    sizes: Sizes
    prompt: int | None = None  # under generate(): how many of the positions are the prompt's
    source_heads: int | None = None  # heads of the keys; None where the call did not show them
    shares: tuple[Share, ...] = ()  # of the map of all ranks, where the model is split over them
    # None where the file of the record does not say
    read: Reading | tuple[Reading, ...] | None = None

    def __repr__(self) -> str:
        batch, heads, query, source = self.sizes
        module = self.module or "(the model itself)"
        return (
            f"layer {self.layer} call {self.call} {self.kind} {module}: "
            f"{batch} x {heads} heads, {query} queries, {source} sources, "
            + (self.how if self.how == "handwritten" else f"by {self.how}")
        )

    _repr_mimebundle_ = mimebundle

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the heads that share a key head, for each key head."""
        shared = self.source_heads or self.sizes[1]
        size = self.sizes[1] // shared
        return tuple(tuple(range(at * size, (at + 1) * size)) for at in range(shared))

    def by_group(self, values: Tensor) -> Tensor:
        """Average values of this record, (batch, head, ...), over the heads that share keys.

        >>> import torch, clearhead as ch
        >>> q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
        >>> with ch.watch(ch.attend, read=ch.readings.Entropy()) as seen:
        ...     context = ch.attend(q, k, k)
        >>> seen[0].groups, seen[0].by_group(seen[0].value).shape
        (((0, 1), (2, 3)), torch.Size([1, 2, 3]))
        """
        at = {head: number for number, head in enumerate(self.heads)}
        groups = ([at[head] for head in group if head in at] for group in self.groups)
        return torch.stack([values[:, group].mean(1) for group in groups if group], 1)

    def to_table(self, tokens: Any = None, top: int = 8) -> list[dict[str, Any]]:
        """List the largest weights of each query, as `Seen.to_table` does for all records."""
        return table(self, tokens, top)


class _Value:
    """The field `value` of a record: a packed value is unpacked when it is first read."""

    def __get__(self, record: Any, owner: Any) -> Any:
        if record is None:
            raise AttributeError("value")
        value = record.__dict__["value"]
        return value() if isinstance(value, packed.PackedValue) else value

    def __set__(self, record: Any, value: Any) -> None:
        record.__dict__["value"] = value


# Set here, because a descriptor inside the class would be taken for a default.
Record.value = _Value()


class Seen(Sequence[Record]):
    """The records of a watched block, in the order of the calls, and `notes` on what changed."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self.notes: list[str] = []

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def to_table(self, tokens: Any = None, top: int = 8) -> list[dict[str, Any]]:
        """List the largest weights, one dict for each layer, head, sample, query and rank.

        >>> import torch, clearhead as ch
        >>> q = torch.tensor([[[[1.0], [2.0]]]])
        >>> with ch.watch(ch.attend, read=ch.readings.TopK(2)) as seen:
        ...     context = ch.attend(q, q, q, ch.masks.causal())
        >>> for row in seen.to_table(["a", "b"]):
        ...     print(row["query_token"], row["rank"], row["source_token"], f"{row['weight']:.3f}")
        a 0 a 1.000
        b 0 b 0.881
        b 1 a 0.119

        The keys are `layer`, `module`, `head`, `sample`, `query`, `rank` (from 0), `source` and
        `weight`, and with `tokens` (a list of strings, or one list a sample) `query_token` and
        `source_token`. At most `top` sources of each query are listed. Sources without any weight
        are left out, and so are padded queries: those at either end of a sample where no position
        may attend to them. The weights are those that were read: `TopK`, `Weights` or `Rows`.
        """
        return [row for record in self for row in record.to_table(tokens, top)]

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the records to one safetensors file, whole or not at all; `load` reads it.

        The header's entry `clearhead` is a JSON document (schema `clearhead.seen`, version 1) that
        lists the records and names their tensors. A file that exists is left alone without `force`.
        """
        if Path(path).exists() and not force:
            raise FileExistsError(f"{path} exists; save(path, force=True) writes over it")
        store.write(path, *outlined(self))

    def __repr__(self) -> str:
        lines = [f"{len(self)} attention calls seen"]
        lines += [f"  {record!r}" for record in self._records[:40]]
        if len(self) > 40:
            lines.append(f"  and {len(self) - 40} more")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    _repr_mimebundle_ = mimebundle


_TREES = "value", "mask", "read"
_PLAIN = [field.name for field in fields(Record) if field.name not in _TREES]


def outlined(seen: Seen) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Turn records into a JSON document, which names their tensors, and these tensors."""
    writer, records = store.Writer(), []
    for record in seen:
        plain = {name: getattr(record, name) for name in _PLAIN}
        trees = {
            "mask": writer.mask(record.mask, record.sizes),
            "value": writer.value(record.value),
            "read": writer.reading(record.read, record.sizes),
        }
        records.append({**plain, **trees})
    head = {"schema": store.SCHEMA, "version": store.VERSION}
    return {**head, "notes": list(seen.notes), "records": records}, writer.tensors


def restored(document: dict[str, Any], tensors: dict[str, Tensor]) -> Seen:
    """Make records of what `outlined` gave."""
    seen = Seen()
    seen.notes += document["notes"]
    for outline in document["records"]:
        plain = {name: outline.get(name) for name in _PLAIN}
        for name in ("heads", "queries"):
            plain[name] = None if plain[name] is None else tuple(plain[name])
        plain["sizes"] = Sizes(*plain["sizes"])
        plain["shares"] = tuple(Share(*share) for share in plain["shares"] or ())
        trees = {
            "value": store.value(outline["value"], tensors),
            "mask": store.mask(outline["mask"], tensors),
            "read": store.reading(outline.get("read"), tensors),
        }
        seen._records.append(Record(**trees, **plain))
    return seen


def load(path: str | Path) -> Seen:
    """Read the records that `seen.save` wrote."""
    return restored(*store.read(path))
