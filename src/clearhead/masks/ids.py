"""Masks of ids: equal ids of queries and sources, and repeats of the query's token."""

# The methods are documented once, in EdgeSet and Mask.
# ruff: noqa: D102
from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core import readable, type_error, value_error
from clearhead.masks.data import as_tensor, at, many_samples, ranked, samples, show
from clearhead.masks.mask import Mask
from clearhead.masks.protocol import Block, Own, Tile
from clearhead.masks.ranges import Interval, carriers, ordered, spans

if TYPE_CHECKING:
    from clearhead._core import Sizes

Numbers = Tensor | Sequence[int] | Sequence[Sequence[int]]


class Same(Mask):
    """Edges between equal ids; without `query_ids` the queries are the last of the sources."""

    _made_of = ("name", "query_ids", "source_ids")

    def __init__(self, name: str, query_ids: Tensor | None, source_ids: Tensor):
        self.name, self.query_ids, self.source_ids = name, query_ids, source_ids
        given = [source_ids] if query_ids is None else [query_ids, source_ids]
        batch = many_samples([len(ids) for ids in given if ids.dim() == 2])
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
        """The least and the largest id among some positions, for every sample."""
        key = (queries, start, stop)
        if key not in self._extents:
            ids = self.query_ids if queries and self.query_ids is not None else self.source_ids
            part = ids[..., start:stop].reshape(-1, stop - start)
            # Ids that all samples share are those of each sample.
            many = 1 if self.own.batch is None else self.own.batch
            times = many if len(part) == 1 else 1
            self._extents[key] = (part.amin(-1).tolist() * times, part.amax(-1).tolist() * times)
        return self._extents[key]

    def _block(self, tile: Tile) -> Block:
        given = (self.source_ids, self.query_ids)
        if not all(ids is None or readable(ids) for ids in given):
            return Block.PARTIAL
        offset = tile.source - tile.query if self.query_ids is None else 0
        rows = self._extent(True, tile.top + offset, tile.bottom + offset)
        columns = self._extent(False, tile.left, tile.right)
        samples = list(zip(*rows, *columns, strict=True))
        if all(high < least or most < low for low, high, least, most in samples):
            return Block.EMPTY
        full = all(low == high == least == most for low, high, least, most in samples)
        return Block.FULL if full else Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> Interval | None:
        if self.query_ids is not None or not readable(self.source_ids):
            return None
        ids = self.source_ids.to(i.device)
        found = spans(torch.atleast_2d(ids))
        if found is None:
            return None
        last = i + (sizes.source - sizes.query)
        start, stop = (x[0, last] if self.own.batch is None else x[:, None, last] for x in found)
        return start, stop

    def sources(self, queries: range, sizes: Sizes) -> Tensor | None:
        ids, rows = self._queries(torch.arange(queries.start, queries.stop), sizes)
        if not readable(ids):
            return None
        wanted = torch.atleast_2d(ids[..., rows.to(ids.device)])
        wanted = wanted.expand(len(self._order), -1)
        found = [carriers(*each) for each in zip(wanted, self._order, strict=True)]
        return torch.cat(found).unique()

    @cached_property
    def _order(self) -> list[tuple[Tensor, Tensor]]:
        return ordered(self.source_ids)

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        ids, p = self._queries(torch.tensor(i, device=self.source_ids.device), sizes)
        query_id = int(at(ids, b, p))
        source_id = int(at(self.source_ids, b, torch.tensor(j, device=self.source_ids.device)))
        what = "document" if self.name == "document" else "id"
        sample = f" in sample {b}" if self.own.batch else ""
        if query_id == source_id:
            return f"query {i} and source {j} both have {what} {source_id}{sample}"
        return f"query {i} has {what} {query_id}, source {j} has {what} {source_id}{sample}"


def document(ids: Numbers) -> Mask:
    """A query may read the sources of its own document: ids[j] == ids[i].

    >>> print(document([0, 0, 1]).picture(3))
      0 1 2
    0 ■ ■ ·
    1 ■ ■ ·
    2 · · ■

    `ids` (source,) for all samples, or (batch, source), number the sources' documents in any
    order; with fewer queries than sources the queries are the last ones.
    """
    return Same("document", None, _ids("ids", ids))


def same(query_ids: Numbers, source_ids: Numbers) -> Mask:
    """A query may read the sources with its own id: source_ids[j] == query_ids[i].

    >>> print(same([0, 1], [1, 1, 0]).picture(2, 3))
      0 1 2
    0 · · ■
    1 ■ ■ ·

    Each (position,) for all samples, or (batch, position).
    """
    queries, sources = _ids("query_ids", query_ids), _ids("source_ids", source_ids)
    counts = {len(ids) for ids in (queries, sources) if ids.dim() == 2 and len(ids) != 1}
    if len(counts) > 1:
        raise value_error(
            "query_ids",
            "needs as many samples as source_ids",
            shapes={"query_ids": queries, "source_ids": sources},
        )
    return Same("same", queries, sources)


class Repeats(Mask):
    """Edges to (`shift` 0) or one after (`shift` 1) earlier occurrences of the query's token."""

    _made_of = ("name", "tokens")

    def __init__(self, name: str, tokens: Tensor, shift: int):
        self.name, self.tokens, self.shift = name, tokens, shift
        self.own = Own(batch=samples(tokens), source=tokens.shape[-1])

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

    def _block(self, tile: Tile) -> Block:
        last = tile.bottom - 1 + tile.source - tile.query
        beyond = tile.left - self.shift >= last or tile.right - 1 - self.shift < 0
        return Block.EMPTY if beyond else Block.PARTIAL

    def sources(self, queries: range, sizes: Sizes) -> Tensor | None:
        if not readable(self.tokens):
            return None
        offset = sizes.source - sizes.query
        wanted = torch.atleast_2d(self.tokens[..., queries.start + offset : queries.stop + offset])
        found = [carriers(*each) for each in zip(wanted, self._order, strict=True)]
        sources = torch.cat(found).unique() + self.shift
        return sources[sources < sizes.source]

    @cached_property
    def _order(self) -> list[tuple[Tensor, Tensor]]:
        return ordered(self.tokens)

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        p, k = i + sizes.source - sizes.query, j - self.shift
        reader = f"query {i}" + (f" (at position {p})" if p != i else "")
        if k < 0:
            return f"no token comes before source {j}"
        if k >= p:
            return f"source {j} {'follows' if self.shift else 'is'} no token before {reader}"
        query_id, source_id = (
            int(at(self.tokens, b, torch.tensor(x, device=self.tokens.device))) for x in (p, k)
        )
        where = (
            f"source {j} follows token {source_id}"
            if self.shift
            else f"source {j} is token {source_id}"
        )
        return f"{where}, {reader} is token {query_id}"


def induction(tokens: Numbers) -> Mask:
    """The sources that follow an earlier occurrence of the query's token: induction's edges.

    >>> print(induction([7, 8, 7, 8]).picture(4))
      0 1 2 3
    0 · · · ·
    1 · · · ·
    2 · ■ · ·
    3 · · ■ ·

    tokens[j - 1] == tokens[i] and j - 1 < i, every earlier occurrence. `tokens` (source,) or
    (batch, source). `readings.Mass(induction(tokens))` is the induction score (Olsson et al. 2022,
    "In-context Learning and Induction Heads").
    """
    return Repeats("induction", _ids("tokens", tokens), 1)


def duplicate(tokens: Numbers) -> Mask:
    """The earlier occurrences of the query's token: tokens[j] == tokens[i] and j < i.

    >>> print(duplicate([7, 8, 7, 8]).picture(4))
      0 1 2 3
    0 · · · ·
    1 · · · ·
    2 ■ · · ·
    3 · ■ · ·

    `tokens` (source,) or (batch, source). `readings.Mass(duplicate(tokens))` finds duplicate-token
    heads (Wang et al. 2022, "Interpretability in the Wild").
    """
    return Repeats("duplicate", _ids("tokens", tokens), 0)


def _ids(name: str, values: Any) -> Tensor:
    tensor = as_tensor(name, values)
    if tensor.is_floating_point() or tensor.is_complex():
        raise type_error(name, "takes integers", got=str(tensor.dtype))
    return ranked(name, tensor if tensor.dtype == torch.int64 else tensor.to(torch.int64))


def _check_last(mask: Mask, sizes: Sizes) -> None:
    if sizes.query > sizes.source:
        raise value_error(
            "mask",
            f"{mask._brief()}: the queries are the last sources, so there are at most as many",
            shapes={"(query, source)": (sizes.query, sizes.source)},
            hint="same(query_ids, source_ids) takes the ids of both sides",
        )
