"""What a page shows: records, or arrays of weights, as a header and chunks of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead._core import Sizes, type_error, value_error
from clearhead.masks import Mask
from clearhead.readings import BlockMap, BlockMapValue, Strip, TopK, TopKValue
from clearhead.recording import Record, Seen
from clearhead.views.page import codes
from clearhead.views.page.axes import Axis, CallPlace, axes_of, is_pair

__all__ = ["Shown", "record_from", "shown_of"]

SCHEMA, VERSION = "clearhead.view", 1
# Numbers of all maps together that a page holds exactly, and that it holds at all.
EXACT, MOST = 1 << 18, 40_000_000
# What is held instead: sources a row, and tiles a side.
TOP, CELLS = 16, 64
# From so many positions on, lists are written as coarse codes.
LONG = 1024
STATISTICS = {
    "entropy": ("entropy", "nats", "-sum_j w_j ln w_j, the mean over the rows", "Zhai et al. 2023"),
    "sink": ("first source", "weight", "the weight on source 0, mean over the rows", "Xiao 2023"),
    "previous": ("previous", "weight", "the weight one position back, mean over the rows", ""),
    "self": ("self", "weight", "the weight on the query's own position, mean over the rows", ""),
}


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


@dataclass(frozen=True)
class Shown:
    """Attention calls, their tokens, and what is said of them."""

    layers: tuple[MapLayer, ...]
    axes: tuple[Axis, ...] = (Axis("tokens"),)
    notes: tuple[str, ...] = ()
    prompt: int | None = None
    title: str = "Attention"
    made_by: str = field(default="clearhead")

    def pages(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the header and the chunks of a page (schema `clearhead.view`, version 1)."""
        chunks: dict[str, bytes] = {}
        total = sum(x.weights.numel() for x in self.layers if x.weights is not None)
        written = [_written(e, x, total, chunks) for e, x in enumerate(self.layers)]
        axes: list[dict[str, Any]] = [asdict(axis) for axis in self.axes]
        if self.prompt is not None:
            axes[0]["prompt"] = self.prompt
        names = _statistics(self.layers, chunks)
        header = {
            "schema": SCHEMA,
            "version": VERSION,
            "kind": "attention",
            "title": self.title,
            "made_by": self.made_by,
            "notes": list(self.notes),
            "holds": _holds(self.layers, total),
            "samples": max((x.sizes.batch for x in self.layers), default=1),
            "axes": axes,
            "layers": written,
            "statistics": [
                dict(zip(("name", "label", "unit", "definition", "paper"), (n, *STATISTICS[n]),
                         strict=True))
                for n in names
            ],
            "effects": [],
            "chunks": {name: len(data) for name, data in chunks.items()},
        }  # fmt: skip
        return header, chunks

    def changed(self, tokens: Any = None, title: str | None = None) -> Shown:
        """The same with other labels, or another title."""
        axes = list(self.axes)
        if tokens is not None:
            axes, _ = axes_of([CallPlace(x.kind, x.module, x.sizes) for x in self.layers], tokens)
        return replace(self, axes=tuple(axes), title=title or self.title)


def record_from(weights: Any, tokens: Any = None) -> Shown:
    """Take weights that something else made, to show them: (query, source) up to four axes.

    >>> import numpy as np
    >>> shown = record_from(np.eye(3), ["a", "b", "c"])
    >>> len(shown.layers), tuple(shown.layers[0].sizes)
    (1, (1, 1, 3, 3))

    Axes are read from the right as (layer, head, query, source); numpy, torch and whatever numpy
    can convert. Weights are between 0 and 1; NaN is shown as such. `tokens` label the positions;
    where there are fewer queries than sources they label the sources, and the queries are the last
    ones. A pair (labels of the queries, labels of the sources) is cross attention.
    """
    maps = _as_maps(weights)
    many, heads, query, source = maps.shape
    kind = "cross" if is_pair(tokens) or query > source else "self"
    sizes = Sizes(1, heads, query, source)
    axes, at = axes_of([CallPlace(kind, f"layers.{n}", sizes) for n in range(many)], tokens)
    layers = tuple(
        MapLayer(n, f"layers.{n}", 0, kind, tuple(range(heads)), sizes, weights=maps[n][None],
                 axes=at[n])
        for n in range(many)
    )  # fmt: skip
    return Shown(layers, tuple(axes), ("the mask is not known: blocked cells are shown as 0",))


def _as_maps(weights: Any) -> Tensor:
    maps = _as_numbers(weights)
    if not 2 <= maps.ndim <= 4 or not maps.numel():
        listed = isinstance(weights, (list, tuple))
        stacked = "torch.stack(weights)[:, 0]" if listed else "weights[:, 0]"
        raise value_error(
            "weights",
            "has the axes (layer, head, query, source), or the last two or three of them, none "
            "of them empty",
            shapes={"weights": tuple(maps.shape)},
            hint=f"weights[None] adds an axis; one sample of a batch is {stacked}",
        )
    least, largest = (float(x) for x in maps.nan_to_num(0, posinf=float("inf")).aminmax())
    # Half precision rounds a weight of 1 up by less than this.
    if least < 0 or largest > 1.01:
        hint = "scores go through softmax first; other numbers are divided by their largest"
        got = f"{least:g} to {largest:g}"
        raise value_error("weights", "are 0 or more, and at most 1", got=got, hint=hint)
    return maps.reshape((1,) * (4 - maps.ndim) + tuple(maps.shape))


def _as_numbers(weights: Any) -> Tensor:
    """A tensor, an array or lists of them as float32 on the CPU."""
    try:
        if isinstance(weights, (list, tuple)) and any(isinstance(x, Tensor) for x in weights):
            weights = torch.stack([x.detach().cpu() for x in weights])
        given = weights if isinstance(weights, Tensor) else np.asarray(weights)
        if isinstance(given, np.ndarray):
            # Other libraries' bfloat16 is of the kind "V".
            known = given.dtype.kind in "biufV"
            given = torch.from_numpy(given.astype(np.float32)) if known else None
        if given is not None and not given.is_complex():
            return given.detach().to("cpu", torch.float32)
        problem = ""
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        problem = f" ({error})"
    rule = f"is an array of numbers{problem}"
    raise type_error("weights", rule, got=type(weights).__name__) from None


def shown_of(
    seen: Seen | Record | Sequence[Record] | Shown, tokens: Any = None, title: str | None = None
) -> Shown:
    """Take records of `watch`, or what `record_from` made, and the labels of their positions."""
    if isinstance(seen, Shown):
        return seen.changed(tokens, title)
    records = [seen] if isinstance(seen, Record) else _records(seen)
    if not records or not all(isinstance(record, Record) for record in records):
        got = type(seen).__name__ if records else "no record"
        hint = "record_from(weights, tokens) takes arrays"
        raise type_error("seen", "is what watch() gave, or a record of it", got=got, hint=hint)
    axes, at = axes_of([CallPlace(r.kind, r.module, r.sizes) for r in records], tokens)
    layers = tuple(_layer_of(record, pair) for record, pair in zip(records, at, strict=True))
    notes = tuple(seen.notes) if isinstance(seen, Seen) else ()
    prompt = records[0].prompt
    return Shown(layers, tuple(axes), notes, prompt, title or "Attention of a model")


def _records(seen: Any) -> list[Any]:
    return list(seen) if isinstance(seen, Sequence) else [seen]


def _layer_of(record: Record, axes: tuple[int, int]) -> MapLayer:
    values = list(_values(record.value))
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
            "read=readings.Weights() for short ones",
        )
    sizes = record.sizes._replace(head=len(record.heads))
    return MapLayer(
        record.layer, record.module, record.call, record.kind, record.heads, sizes, record.mask,
        record.check, rows, maps[0].float().cpu() if maps else None, top, tiles, axes,
    )  # fmt: skip


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        yield from value
    else:
        yield value


def _written(index: int, layer: MapLayer, total: int, chunks: dict[str, bytes]) -> dict[str, Any]:
    """Write the chunks of one call, and return its entry of the header."""
    sizes, whole = layer.sizes, layer.weights is not None and total <= MOST
    exact = total <= EXACT
    top, tiles = layer.top, layer.blocks
    if layer.weights is not None and not whole:
        top, tiles = top or _top_of(layer.weights), tiles or _blocks_of(layer.weights)
    planes = top is not None and sizes.query > LONG
    for sample in range(sizes.batch):
        for head in range(sizes.head):
            place = f"{sample}/{index}/{head}"
            if layer.weights is not None:
                one = layer.weights[sample, head].contiguous()
                chunks[f"sums/{place}"] = codes.row_sums(one.sum(-1))
                if whole:
                    raw = one.numpy().astype("<f4").tobytes() if exact else codes.log_codes(one)
                    chunks[f"full/{place}"] = raw
            if top is not None and not whole:
                pack = codes.top_planes if planes else codes.top_values
                pair = (x[sample, head].cpu() for x in (top.weights.float(), top.sources))
                chunks[f"top/{place}"] = pack(*pair, sizes.source)
            if tiles is not None and not whole:
                mean, largest = (x[sample, head].float().cpu() for x in tiles)
                chunks[f"block/{place}"] = codes.blocks(mean, largest)
        if layer.mask is not None:
            chunks[f"mask/{sample}/{index}"] = codes.mask_runs(layer.mask, sizes, sample)
    return {
        "layer": layer.layer,
        "module": layer.module,
        "call": layer.call,
        "kind": layer.kind,
        "heads": list(layer.heads),
        "queries": sizes.query,
        "sources": sizes.source,
        "query_axis": layer.axes[0],
        "source_axis": layer.axes[1],
        "rows": None if layer.rows is None else list(layer.rows),
        "offset": sizes.source - sizes.query if layer.kind == "self" else 0,
        "mask": None if layer.mask is None else f"mask/0/{index}",
        "check": layer.check,
        "encoding": ("f32" if exact else "log8") if whole else None,
        "top": 0 if top is None or whole else top.weights.shape[-1],
        "top_encoding": "planes" if planes else "f16",
        "top_steps": codes.COARSE,
        "cells": 0 if tiles is None or whole else max(tiles.mean.shape[-2:]),
        "sums": layer.weights is not None,
    }


def _strips(weights: Tensor) -> Strip:
    """The weights as a strip that readings take: the scores are their logarithms."""
    scores = weights.log()
    rows, columns = (torch.arange(size) for size in weights.shape[-2:])
    lse = weights.sum(-1).log()
    return Strip(scores, weights, lse, rows, columns, *weights.shape[-2:])


def _top_of(weights: Tensor) -> TopKValue:
    reading = TopK(min(TOP, weights.shape[-1]))
    return reading.finish(reading.part(_strips(weights)))


def _blocks_of(weights: Tensor) -> BlockMapValue:
    reading = BlockMap(CELLS)
    return reading.finish(reading.part(_strips(weights)))


def _holds(layers: Sequence[MapLayer], total: int) -> list[str]:
    """Say what the page holds, and what it leaves out."""
    held = []
    if total:
        kind = "in full" if total <= EXACT else "in full, to 2.2%"
        kind = (
            kind
            if total <= MOST
            else f"as the {TOP} largest of each query and {CELLS} tiles a side"
        )
        held.append(f"{total:,} weights {kind}.")
    if any(x.weights is None and x.top is not None for x in layers):
        held.append("The largest weights of each query; the rest is given as a remainder.")
        if any(x.top is not None and x.sizes.query > LONG for x in layers):
            held.append(codes.COARSELY)
    if any(x.weights is None and x.blocks is not None for x in layers):
        held.append("The mean and the largest weight of each tile of the map.")
    return held


def _statistics(layers: Sequence[MapLayer], chunks: dict[str, bytes]) -> list[str]:
    """Write the statistics of each head where all weights are known; return their names."""
    if any(x.weights is None or x.rows is not None for x in layers):
        return []
    heads = max(x.sizes.head for x in layers)
    batch = max(x.sizes.batch for x in layers)
    found = torch.full((len(STATISTICS), batch, len(layers), heads), torch.nan)
    for e, layer in enumerate(layers):
        assert layer.weights is not None
        for n, name in enumerate(STATISTICS):
            value = _statistic(name, layer)
            if value is not None:
                found[n, : value.shape[0], e, : value.shape[1]] = value
    chunks["statistics"] = found.numpy().astype("<f4").tobytes()
    return list(STATISTICS)


def _statistic(name: str, layer: MapLayer) -> Tensor | None:
    weights, (_, _, query, source) = layer.weights, layer.sizes
    assert weights is not None
    if name == "entropy":
        return torch.special.entr(weights).sum(-1).mean(-1)
    if name == "sink":
        return weights[..., 0].mean(-1) if source else None
    back = source - query - (name == "previous")
    diagonal = weights.diagonal(back, -2, -1)
    known = layer.kind == "self" and diagonal.shape[-1] > 0
    return diagonal.mean(-1) if known else None
