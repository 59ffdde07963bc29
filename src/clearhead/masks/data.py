"""Masks that hold data: lengths, padding, document ids, tokens and tensors."""

# The methods are documented once, in Mask.
# ruff: noqa: D102
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core import value_error
from clearhead.masks.mask import Block, Mask, Own, readable
from clearhead.masks.ranges import Interval

if TYPE_CHECKING:
    from clearhead._core import Sizes

# A tensor with more numbers than this is shown by its shape.
SHOWN = 64


class Lengths(Mask):
    """Edges inside the filled part of every sample."""

    _made_of = ("source", "query")

    def __init__(self, source: Tensor, query: Tensor | None):
        self.source, self.query = source, query
        counts = [t.shape[0] for t in (source, query) if t is not None and t.dim()]
        self.own = Own(batch=_many(counts))
        self._known: list[tuple[int, int | None]] | None = None

    def to(self, device: torch.device | str) -> Mask:
        query = None if self.query is None else self.query.to(device)
        return Lengths(self.source.to(device), query)

    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        for b, (source, query) in enumerate(self._read() or ()):
            for name, length, size in (
                ("source", source, sizes.source),
                ("query", query, sizes.query),
            ):
                if length is not None and length > size:
                    raise value_error(
                        "mask",
                        f"lengths: sample {b} has {length} {name} positions, the call has {size}",
                        shapes={"call (query, source)": (sizes.query, sizes.source)},
                        hint="make the mask from the data of this call",
                    )

    def _least(self) -> int:
        return max((max(source, query or 0) for source, query in self._read() or ()), default=0)

    def _read(self) -> list[tuple[int, int | None]] | None:
        """The lengths of every sample as numbers, where they can be known."""
        if self._known is None and all(t is None or readable(t) for t in (self.source, self.query)):
            many = 1 if self.own.batch is None else self.own.batch
            source = self.source.expand(many).tolist()
            query = [None] * many if self.query is None else self.query.expand(many).tolist()
            self._known = list(zip(source, query, strict=True))
        return self._known

    def _of(self, lengths: Tensor, b: Any, like: Any) -> Tensor:
        lengths = lengths.to(like.device)
        return lengths[b] if lengths.dim() and lengths.shape[0] != 1 else lengths.reshape(())

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        edges = (i == i) & (j < self._of(self.source, b, j))
        return edges if self.query is None else edges & (i < self._of(self.query, b, j))

    def _text(self, full: bool) -> str:
        query = "" if self.query is None else f", query={show(self.query)}"
        return f"lengths({show(self.source)}{query})"

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        known = self._read()
        if known is None:
            return Block.PARTIAL
        if all(left >= s or (q is not None and top >= q) for s, q in known):
            return Block.EMPTY
        full = all(right <= s and (q is None or bottom <= q) for s, q in known)
        return Block.FULL if full else Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        shape = () if self.own.batch is None else (-1, 1, 1)
        stop = self.source.to(i.device).reshape(shape) + torch.zeros_like(i)
        if self.query is not None:
            stop = torch.where(i < self.query.to(i.device).reshape(shape), stop, 0)
        return torch.zeros_like(stop), stop

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        source = int(self._of(self.source, b, self.source))
        sample = f"sample {b}" if self.own.batch else "the sequence"
        if self.query is not None and i >= (query := int(self._of(self.query, b, self.query))):
            return f"query {i} is padding: {sample} has {query} queries"
        if j >= source:
            return f"source {j} is padding: {sample} has {source} sources"
        return f"source {j} is one of the {source} sources of {sample}"


class Keep(Mask):
    """Edges to real sources."""

    _made_of = ("real",)

    def __init__(self, real: Tensor):
        self.real = real
        self.own = Own(batch=_samples(real), source=real.shape[-1])
        self._sums: tuple[list[int], list[int]] | None = None

    def to(self, device: torch.device | str) -> Mask:
        return Keep(self.real.to(device))

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        return (i == i) & at(self.real, b, j)

    def _text(self, full: bool) -> str:
        return f"keep({show(self.real)})"

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        if self._sums is None:
            if not readable(self.real):
                return Block.PARTIAL
            flat = torch.atleast_2d(self.real)
            both = (flat.any(0), flat.all(0))
            self._sums = tuple([0, *x.cumsum(0).tolist()] for x in both)  # pyright: ignore
        some, every = self._sums  # pyright: ignore[reportGeneralTypeIssues]
        if some[right] == some[left]:
            return Block.EMPTY
        return Block.FULL if every[right] - every[left] == right - left else Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        found = runs(self.real.to(i.device))
        if found is None:
            return None
        start, stop = (x if self.own.batch is None else x[:, None, None] for x in found)
        return start + torch.zeros_like(i), stop + torch.zeros_like(i)

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        real = bool(at(self.real, b, torch.tensor(j, device=self.real.device)))
        sample = f" in sample {b}" if self.own.batch else ""
        return f"source {j} is {'real' if real else 'padding'}{sample}"


class Same(Mask):
    """Edges between equal ids; without `query_ids` the queries are the last of the sources."""

    _made_of = ("name", "query_ids", "source_ids")

    def __init__(self, name: str, query_ids: Tensor | None, source_ids: Tensor):
        self.name, self.query_ids, self.source_ids = name, query_ids, source_ids
        given = [source_ids] if query_ids is None else [query_ids, source_ids]
        batch = _many([len(ids) for ids in given if ids.dim() == 2])
        query = None if query_ids is None else query_ids.shape[-1]
        self.own = Own(batch, None, query, source_ids.shape[-1])
        self._extents: dict[tuple[bool, int, int], tuple[list[int], list[int]]] = {}

    def to(self, device: torch.device | str) -> Mask:
        query = None if self.query_ids is None else self.query_ids.to(device)
        return type(self)(self.name, query, self.source_ids.to(device))

    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        if self.query_ids is None:
            _check_last(self, sizes)

    def _queries(self, i: Any, sizes: Sizes) -> tuple[Tensor, Any]:
        if self.query_ids is not None:
            return self.query_ids, i
        return self.source_ids, i + (sizes.source - sizes.query)

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        ids, i = self._queries(i, sizes)
        return at(ids, b, i) == at(self.source_ids, b, j)

    def _text(self, full: bool) -> str:
        query = "" if self.query_ids is None else f"{show(self.query_ids)}, "
        return f"{self.name}({query}{show(self.source_ids)})"

    def _extent(self, queries: bool, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Least and largest id among some positions, for every sample."""
        key = (queries, start, stop)
        if key not in self._extents:
            ids = self.query_ids if queries and self.query_ids is not None else self.source_ids
            part = ids[..., start:stop].reshape(-1, stop - start)
            self._extents[key] = (part.amin(-1).tolist(), part.amax(-1).tolist())
        return self._extents[key]

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        if not readable(self.source_ids) or (
            self.query_ids is not None and not readable(self.query_ids)
        ):
            return Block.PARTIAL
        offset = source - query if self.query_ids is None else 0
        rows = _extend(self._extent(True, top + offset, bottom + offset), self.own.batch)
        columns = _extend(self._extent(False, left, right), self.own.batch)
        samples = list(zip(*rows, *columns, strict=True))
        if all(high < least or most < low for low, high, least, most in samples):
            return Block.EMPTY
        full = all(low == high == least == most for low, high, least, most in samples)
        return Block.FULL if full else Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        if self.query_ids is not None or not readable(self.source_ids):
            return None
        ids = self.source_ids.to(i.device)
        found = spans(torch.atleast_2d(ids))
        if found is None:
            return None
        last = i + (sizes.source - sizes.query)
        start, stop = (x[0, last] if self.own.batch is None else x[:, None, last] for x in found)
        return start, stop

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        ids, p = self._queries(torch.tensor(i, device=self.source_ids.device), sizes)
        mine = int(at(ids, b, p))
        its = int(at(self.source_ids, b, torch.tensor(j, device=self.source_ids.device)))
        what = "document" if self.name == "document" else "id"
        sample = f" in sample {b}" if self.own.batch else ""
        if mine == its:
            return f"query {i} and source {j} both have {what} {its}{sample}"
        return f"query {i} has {what} {mine}, source {j} has {what} {its}{sample}"


class Repeats(Mask):
    """Edges to (`shift` 0) or one after (`shift` 1) earlier occurrences of the query's token."""

    _made_of = ("name", "tokens")

    def __init__(self, name: str, tokens: Tensor, shift: int):
        self.name, self.tokens, self.shift = name, tokens, shift
        self.own = Own(batch=_samples(tokens), source=tokens.shape[-1])

    def to(self, device: torch.device | str) -> Mask:
        return Repeats(self.name, self.tokens.to(device), self.shift)

    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        _check_last(self, sizes)

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        p, k = i + (sizes.source - sizes.query), j - self.shift
        alike = at(self.tokens, b, p) == at(self.tokens, b, k.clamp(min=0))
        return alike & (k < p) & (k >= 0)

    def _text(self, full: bool) -> str:
        return f"{self.name}({show(self.tokens)})"

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        last = bottom - 1 + source - query
        beyond = left - self.shift >= last or right - 1 - self.shift < 0
        return Block.EMPTY if beyond else Block.PARTIAL

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        p, k = i + sizes.source - sizes.query, j - self.shift
        asker = f"query {i}" + (f" (at position {p})" if p != i else "")
        if k < 0:
            return f"no token comes before source {j}"
        if k >= p:
            return f"source {j} {'follows' if self.shift else 'is'} no token before {asker}"
        mine, its = (
            int(at(self.tokens, b, torch.tensor(x, device=self.tokens.device))) for x in (p, k)
        )
        where = f"source {j} follows token {its}" if self.shift else f"source {j} is token {its}"
        return f"{where}, {asker} is token {mine}"


class Dense(Mask):
    """The edges that are True in a tensor."""

    _made_of = ("tensor",)
    stored = True

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        batch, head = tensor.shape[:2] if tensor.dim() == 4 else (None, None)
        query, source = (None if size == 1 else size for size in tensor.shape[-2:])
        self.own = Own(batch, head, query, source)

    def to(self, device: torch.device | str) -> Mask:
        return Dense(self.tensor.to(device))

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        tensor = self.tensor.to(j.device)
        i, j = (
            x if own is not None else x * 0
            for x, own in ((i, self.own.query), (j, self.own.source))
        )
        if tensor.dim() == 2:
            return tensor[i, j]
        many, heads = tensor.shape[:2]
        return tensor[b if many > 1 else b * 0, h if heads > 1 else h * 0, i, j]

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        edges = self.tensor.to(rows.device)
        if self.own.query is not None:
            edges = edges.index_select(-2, rows)
        if self.own.source is not None:
            edges = edges.index_select(-1, columns)
        return edges.expand(*edges.shape[:-2], rows.shape[0], columns.shape[0])

    def _text(self, full: bool) -> str:
        return f"dense({show(self.tensor)})"

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        # On an accelerator each answer would wait for the device.
        if not readable(self.tensor) or self.tensor.device.type != "cpu":
            return Block.PARTIAL
        rows = slice(top, bottom) if self.own.query is not None else slice(None)
        columns = slice(left, right) if self.own.source is not None else slice(None)
        part = self.tensor[..., rows, columns]
        if not part.any():
            return Block.EMPTY
        return Block.FULL if part.all() else Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        tensor = self.tensor.to(i.device)
        tensor = tensor.expand(*tensor.shape[:-2], sizes.query, sizes.source)
        return runs(tensor)

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[Interval] | None:
        # Looking for the runs of a whole map costs more than reading it as it is.
        return None if self.own.query is not None else super()._ranges(i, sizes, most)

    def strip(self, queries: range, sizes: Sizes) -> Tensor:
        tensor = self.tensor
        if self.own.query is not None:
            tensor = tensor[..., queries.start : queries.stop, :]
        return tensor if tensor.ndim == 4 else tensor[None, None]

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        b_, h_, i_, j_ = (torch.tensor(x, device=self.tensor.device) for x in (b, h, i, j))
        return f"the tensor is {bool(self._at(b_, h_, i_, j_, sizes))} there"


def at(values: Tensor, b: Any, i: Any) -> Tensor:
    """Values of (position,) or (batch, position) at index tensors that broadcast."""
    values = values.to(i.device)
    if values.dim() == 1:
        return values[i]
    if 0 in values.shape:  # torch refuses to index an empty axis, also by no index
        return values.new_zeros(torch.broadcast_shapes(b.shape, i.shape))
    return values[b if values.shape[0] != 1 else b * 0, i]


def runs(real: Tensor) -> tuple[Tensor, Tensor] | None:
    """Start and stop of the one run of True in every row (last axis), or None."""
    if not readable(real):
        return None
    size = real.shape[-1]
    if not size:
        zero = torch.zeros(real.shape[:-1], dtype=torch.int64, device=real.device)
        return zero, zero
    many = real.sum(-1)
    start = real.to(torch.uint8).argmax(-1)
    last = size - 1 - real.flip(-1).to(torch.uint8).argmax(-1)
    if ((many > 0) & (last - start + 1 != many)).any():
        return None
    return start, start + many


def spans(ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """Start and stop of each position's run of equal ids (batch, position), if no id comes back."""
    many, size = ids.shape
    index = torch.arange(size, device=ids.device).expand(many, size)
    if not size:
        return index, index
    change = ids[:, 1:] != ids[:, :-1]
    edge = change.new_ones(many, 1)
    starts = torch.cat([edge, change], -1)
    # An id that comes back has more runs than there are different ids.
    ordered = ids.sort(-1).values
    if not torch.equal((ordered[:, 1:] != ordered[:, :-1]).sum(-1), change.sum(-1)):
        return None
    start = torch.where(starts, index, 0).cummax(-1).values
    stops = torch.where(torch.cat([change, edge], -1), index + 1, size)
    return start, stops.flip(-1).cummin(-1).values.flip(-1)


def show(values: Tensor) -> str:
    """A tensor inside of an expression: its values where they are few."""
    if values.numel() > SHOWN or not readable(values):
        return f"<{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}>"
    return str(values.tolist())


def _samples(values: Tensor) -> int | None:
    return values.shape[0] if values.dim() == 2 else None


def _many(counts: list[int]) -> int | None:
    """The samples of several tensors; one sample stands for as many as the others have."""
    return next((count for count in counts if count != 1), counts[0] if counts else None)


def _extend(extent: tuple[list[int], list[int]], batch: int | None) -> tuple[list[int], list[int]]:
    """Ids that are the same for every sample, for each sample."""
    low, high = extent
    many = 1 if batch is None else batch
    return (low, high) if len(low) == many else (low * many, high * many)


def _check_last(mask: Mask, sizes: Sizes) -> None:
    if sizes.query > sizes.source:
        raise value_error(
            "mask",
            f"{mask._brief()}: the queries are the last sources, so there are at most as many",
            shapes={"(query, source)": (sizes.query, sizes.source)},
            hint="same(query_ids, source_ids) takes the ids of both sides",
        )
