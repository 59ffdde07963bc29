"""One attention call as it is shown: what was read of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from clearhead._core import Sizes, value_error
from clearhead.masks import Mask
from clearhead.readings import BlockMapValue, TopKValue
from clearhead.recording import Record

__all__ = ["MapLayer", "layer_of", "values_of"]


@dataclass(frozen=True)
class MapLayer:
    """One attention call as it is shown: what was read of it, (sample, head, ...)."""

    layer: int
    module: str
    call: int
    kind: str
    heads: tuple[int, ...]
    sizes: Sizes
    mask: Mask | None = None
    check: float | None = None
    rows: tuple[int, ...] | None = None
    weights: Tensor | None = None
    top: TopKValue | None = None
    blocks: BlockMapValue | None = None
    axes: tuple[int, int] = (0, 0)  # of its queries and of its sources
    read: tuple[tuple[Any, Any], ...] = field(default=(), repr=False)  # readings with their values


def layer_of(record: Record, axes: tuple[int, int]) -> MapLayer:
    """Take what a map is drawn of from a record; a record without any is a ValueError."""
    values = list(values_of(record.value))
    top = next((x for x in values if isinstance(x, TopKValue)), None)
    tiles = next((x for x in values if isinstance(x, BlockMapValue)), None)
    query, source = record.sizes[2:]
    rows = None if record.queries is None else tuple(q % query for q in record.queries)
    maps = [x for x in values if isinstance(x, Tensor) and x.ndim == 4
            and x.shape[-2:] == (query if rows is None else len(rows), source)
            and not bool((x < 0).any())]  # fmt: skip
    if not maps and top is None and tiles is None:
        raise value_error(
            "seen",
            "holds what a map is drawn of: Weights, TopK or BlockMap",
            got=f"{record!r}",
            hint="watch(model, read=(readings.TopK(16), readings.BlockMap(64))) for long texts, "
            'read=readings.Weights() for short ones; view(seen, kind="mask") shows the masks alone',
        )
    read = list(values_of(record.read))
    return MapLayer(
        record.layer, record.module, record.call, record.kind, record.heads,
        record.sizes._replace(head=len(record.heads)), record.mask, record.check, rows,
        maps[0].float().cpu() if maps else None, top, tiles, axes,
        tuple(zip(read, values, strict=True)) if len(read) == len(values) else (),
    )  # fmt: skip


def values_of(value: Any) -> Iterator[Any]:
    """One value, or each of several: what mirrors `read`."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        yield from value
    else:
        yield value
