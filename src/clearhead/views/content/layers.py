"""One attention call of a page: its entry in the header, and its chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.readings import BlockMap, BlockMapValue, Strip, TopK, TopKValue
from clearhead.views.content.maps import MapLayer
from clearhead.views.page import codes

__all__ = ["CELLS", "EXACT", "LONG", "MOST", "TOP", "LayerContent", "MapPlan"]

# Numbers of all maps together that a file holds exactly, and that it holds at all.
EXACT, MOST = 1 << 18, 40_000_000
# Numbers of one map that are sent whole where they are asked for.
SENT = 1 << 20
# What is held instead: sources a row, and tiles a side.
TOP, CELLS = 16, 64
# From so many positions on, lists are written as coarse codes.
LONG = 1024


@dataclass(frozen=True)
class MapPlan:
    """How much is held: the numbers of all maps together, and whether rows can be asked for."""

    total: int
    live: bool = False

    @property
    def cut(self) -> bool:
        """Whether a file holds the largest weights in place of the maps."""
        return not self.live and self.total > MOST

    def encoding(self, layer: MapLayer) -> str | None:
        """How the whole map of a call is written; None where its largest weights stand for it."""
        if layer.weights is None:
            return None
        if self.live:
            return "f32" if layer.weights[0, 0].numel() <= SENT else None
        return None if self.cut else "f32" if self.total <= EXACT else "log8"

    def lists(self, layer: MapLayer) -> str:
        """How the largest weights are written."""
        if self.live:
            return "f32"
        return "planes" if layer.sizes.query > LONG else "f16"

    def bytes_of(self, layer: MapLayer) -> int:
        """About how many bytes a file takes for a call."""
        encoding = self.encoding(layer)
        batch, heads, query, _ = layer.sizes
        if encoding is not None and layer.weights is not None:
            return layer.weights.numel() * (4 if encoding == "f32" else 1)
        top = TOP if layer.top is None else layer.top.weights.shape[-1]
        listed = layer.top is not None or layer.weights is not None
        return batch * heads * (listed * query * top * 2 + 2 * CELLS**2)


@dataclass(frozen=True)
class LayerContent:
    """What a page is given of one call, the `index`th of its record."""

    layer: MapLayer
    index: int
    plan: MapPlan
    mask: str | None  # the name of the chunk of sample 0, which calls with one mask share

    def entry(self, axes: tuple[int, int] | None = None) -> dict[str, Any]:
        """The entry of the header, schema in `clearhead.views.page`."""
        layer, sizes, top, tiles = self.layer, self.layer.sizes, self._top(), self._tiles()
        encoding = self.plan.encoding(layer)
        query_axis, source_axis = axes or layer.axes
        return {
            "layer": layer.layer,
            "module": layer.module,
            "call": layer.call,
            "kind": layer.kind,
            "heads": list(layer.heads),
            "queries": sizes.query,
            "sources": sizes.source,
            "query_axis": query_axis,
            "source_axis": source_axis,
            "rows": None if layer.rows is None else list(layer.rows),
            "offset": sizes.source - sizes.query if layer.kind == "self" else 0,
            "mask": self.mask,
            "check": layer.check,
            "encoding": encoding,
            "top": top,
            "top_encoding": self.plan.lists(layer),
            "top_steps": codes.COARSE,
            "cells": tiles,
            "sums": layer.weights is not None,
            "live": self.plan.live and layer.weights is not None and encoding is None,
        }

    def makers(self, prefix: str = "") -> dict[str, Callable[[], bytes]]:
        """What makes each chunk, by name."""
        made: dict[str, Callable[[], bytes]] = {}
        kinds = {
            "sums": self.layer.weights is not None,
            "full": self.plan.encoding(self.layer) is not None,
            "top": self._top() > 0,
            "block": self._tiles() > 0,
        }
        for sample in range(self.layer.sizes.batch):
            for head in range(self.layer.sizes.head):
                for kind, held in kinds.items():
                    if held:
                        name = f"{prefix}{kind}/{sample}/{self.index}/{head}"
                        made[name] = partial(getattr(self, f"_{kind}_chunk"), sample, head)
            if self.layer.mask is not None and self.mask == f"mask/0/{self.index}":
                name = f"{prefix}mask/{sample}/{self.index}"
                made[name] = partial(codes.mask_runs, self.layer.mask, self.layer.sizes, sample)
        return made

    def row(self, sample: int, head: int, query: int) -> bytes:
        """All weights of one query."""
        layer = self.layer
        assert layer.weights is not None
        at = query if layer.rows is None else layer.rows.index(query)
        return layer.weights[sample, head, at].numpy().astype("<f4").tobytes()

    def column(self, sample: int, head: int, source: int) -> bytes:
        """The weights that all queries put on one source."""
        assert self.layer.weights is not None
        return self.layer.weights[sample, head, :, source].numpy().astype("<f4").tobytes()

    def _top(self) -> int:
        layer = self.layer
        if self.plan.encoding(layer) is not None:
            return 0
        if layer.top is not None:
            return layer.top.weights.shape[-1]
        return min(TOP, layer.sizes.source) if layer.weights is not None else 0

    def _tiles(self) -> int:
        layer = self.layer
        if self.plan.encoding(layer) is not None:
            return 0
        if layer.blocks is not None:
            return max(layer.blocks.mean.shape[-2:])
        return min(CELLS, max(layer.sizes[2:])) if self._drawn_in_tiles else 0

    @property
    def _drawn_in_tiles(self) -> bool:
        """Blocks are of all queries; a record of some rows has none."""
        return self.layer.weights is not None and self.layer.rows is None

    def _one(self, sample: int, head: int) -> Tensor:
        assert self.layer.weights is not None
        return self.layer.weights[sample, head].contiguous()

    def _sums_chunk(self, sample: int, head: int) -> bytes:
        return codes.row_sums(self._one(sample, head).sum(-1))

    def _full_chunk(self, sample: int, head: int) -> bytes:
        one = self._one(sample, head)
        exact = self.plan.encoding(self.layer) == "f32"
        return one.numpy().astype("<f4").tobytes() if exact else codes.log_codes(one)

    def _top_chunk(self, sample: int, head: int) -> bytes:
        given = self.layer.top
        if given is None:
            top = _top_of(self._one(sample, head))
        else:
            top = TopKValue(*(x[sample, head].cpu() for x in given))
        kind, source = self.plan.lists(self.layer), self.layer.sizes.source
        if kind == "planes":
            return codes.top_planes(top.weights.float(), top.sources, source)
        return codes.top_values(top.weights.float(), top.sources, source, kind)

    def _block_chunk(self, sample: int, head: int) -> bytes:
        given = self.layer.blocks
        tiles = _blocks_of(self._one(sample, head)) if given is None else given
        pair = tiles if given is None else (x[sample, head] for x in given)
        mean, largest = (x.float().cpu() for x in pair)
        return codes.blocks(mean, largest)


def _strip(weights: Tensor) -> Strip:
    """The weights as a strip that readings take: the scores are their logarithms."""
    rows, columns = (torch.arange(size) for size in weights.shape[-2:])
    return Strip(weights.log(), weights, weights.sum(-1).log(), rows, columns, *weights.shape[-2:])


def _top_of(weights: Tensor) -> TopKValue:
    reading = TopK(min(TOP, weights.shape[-1]))
    return reading.finish(reading.part(_strip(weights)))


def _blocks_of(weights: Tensor) -> BlockMapValue:
    reading = BlockMap(CELLS)
    return reading.finish(reading.part(_strip(weights)))
