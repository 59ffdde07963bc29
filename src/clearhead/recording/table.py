"""The weights of records as a table: one dict for each weight that a query puts on a source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead import readings
from clearhead._core import is_number, type_error, value_error

__all__ = ["table"]

# Edges of a mask that are looked at together.
_STRIP = 1 << 20
_TABULAR = readings.TopK | readings.Weights | readings.Rows


def table(record: Any, tokens: Any = None, top: int = 8) -> list[dict[str, Any]]:
    """Tabulate the largest weights of each query of a record, as `Record.to_table` describes."""
    if not is_number(top) or top < 1:
        raise value_error("top", "is a number of sources, at least 1", got=repr(top))
    labels = None if tokens is None else _labels(record, tokens)
    queries, weights, sources = _largest(record, int(top))
    padded = _padded(record)[:, queries]
    kept = (sources >= 0) & (weights != 0) & ~padded[:, None, :, None]
    order = 1, 0, 2, 3  # head, sample, query, rank
    kept, weights, sources = (x.permute(order) for x in (kept, weights, sources))
    found = zip(
        kept.nonzero().tolist(), sources[kept].tolist(), weights[kept].tolist(), strict=True
    )
    return [
        {
            "layer": record.layer,
            "module": record.module,
            "head": record.heads[head],
            "sample": sample,
            "query": queries[at],
            "rank": rank,
            "source": source,
            "weight": weight,
            **_tokens(labels, sample, queries[at], source),
        }
        for (head, sample, at, rank), source, weight in found
    ]


def _largest(record: Any, top: int) -> tuple[list[int], Tensor, Tensor]:
    """Give the queries of a value, and their largest weights with their sources, in order."""
    reading, value = _tabular(record)
    total = record.sizes.query
    chosen = range(total) if record.queries is None else record.queries
    queries = sorted({query % total for query in chosen})
    if isinstance(reading, readings.TopK):
        return queries, value.weights[..., :top].cpu(), value.sources[..., :top].cpu()
    if isinstance(reading, readings.Rows):
        queries = [query % total for query in reading.queries]
    weights, sources = value.cpu().sort(dim=-1, descending=True, stable=True)
    return queries, weights[..., :top], sources[..., :top]


def _tabular(record: Any) -> tuple[Any, Any]:
    """Give the first reading that has weights of single sources, and its value."""
    rule = "has the weights of single sources: read TopK(k), Weights() or Rows(queries)"
    if record.read is None:
        hint = "watch again, and save the records with this version"
        raise value_error("record", rule, got="a file that does not say what was read", hint=hint)
    several = isinstance(record.read, tuple)
    read: tuple[Any, ...] = record.read if several else (record.read,)
    values = record.value if several else (record.value,)
    for reading, value in zip(read, values, strict=True):
        if isinstance(reading, _TABULAR):
            return reading, value
    got = ", ".join(map(repr, read)) or "nothing"
    raise value_error(
        "record", rule, got=f"what was read of layer {record.layer}: {got}",
        hint="watch(model, read=readings.TopK(8))",
    )  # fmt: skip


def _padded(record: Any) -> Tensor:
    """Tell which queries are padding, (batch, query).

    Padding is at either end of a sample, where no query may attend to a position, not even its own,
    in a mask under which positions may attend to themselves.
    """
    batch, _, query, source = record.sizes
    none = torch.zeros(batch, query, dtype=torch.bool)
    if record.mask is None or record.kind == "cross" or not 0 < query <= source:
        return none
    last, full, own = torch.full((1, source), -1), [], False
    for start, edges in _edges(record):
        at = torch.arange(start, start + edges.shape[1])[:, None]
        last = torch.maximum(last, torch.where(edges, at, -1).amax(1))
        full.append(edges.all(-1))
        own = own or bool(edges.diagonal(source - query + start, 1, 2).any())
    if not own:
        return none
    unread = last < _uniform(torch.cat(full, 1), last)
    ends = unread.cummin(1).values | unread.flip(1).cummin(1).values.flip(1)
    return ends[:, source - query :].expand(batch, query)


def _uniform(full: Tensor, last: Tensor) -> Tensor:
    """Count the first queries, (batch, 1), that only mask one another, and so mask nothing.

    A model that masks by the lowest number instead of -inf has uniform rows where it masks all, on
    the left of padded samples. Such queries may attend to everything, and no other to them.
    """
    count = full.cummin(1).values.sum(1, keepdim=True)
    among = torch.arange(last.shape[1]) < count
    apart = ((last < count) | ~among).all(1, keepdim=True) & (count < full.shape[1])
    return torch.where(apart, count, 0)


def _edges(record: Any) -> Iterator[tuple[int, Tensor]]:
    """Iterate over the mask: a first query, and the edges from there on in any head."""
    assert record.mask is not None
    batch, heads, query, source = record.sizes
    step = max(1, _STRIP // max(1, batch * heads * source))
    for start in range(0, query, step):
        rows = torch.arange(start, min(start + step, query))
        tile = record.mask.tile(rows, torch.arange(source), record.sizes).cpu()
        yield start, tile.reshape((1,) * (4 - tile.ndim) + tuple(tile.shape)).any(1)


Labels = Sequence[Sequence[str]]


def _labels(record: Any, tokens: Any) -> tuple[Labels, int]:
    """Check the tokens: one list a sample; and give the position of the first query."""
    batch, _, query, source = record.sizes
    if record.kind == "cross":
        hint = "leave tokens out for it, and look them up by query and source"
        raise value_error(
            "tokens", "are of one sequence", got=f"cross attention in {record!r}", hint=hint
        )
    flat = all(isinstance(token, str) for token in tokens)
    lists = [list(tokens)] if flat else [list(sample) for sample in tokens]
    if not all(isinstance(token, str) for sample in lists for token in sample):
        raise type_error("tokens", "are strings: a list, or one list a sample", got=repr(tokens))
    # Under generate() the last token is never a query.
    lengths = {source} if record.prompt is None else {source, source + 1}
    if len(lists) != batch or any(len(sample) not in lengths for sample in lists):
        raise value_error(
            "tokens",
            f"are {source} strings for each of {batch} samples",
            got=f"{len(lists)} samples of {', '.join(str(len(sample)) for sample in lists)}",
        )
    return lists, max(source - query, 0)


def _tokens(
    labels: tuple[Labels, int] | None, sample: int, query: int, source: int
) -> dict[str, str]:
    if labels is None:
        return {}
    lists, first = labels
    return {"query_token": lists[sample][first + query], "source_token": lists[sample][source]}
