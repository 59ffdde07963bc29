"""Records made of numbers alone, in the page's schema: what the page must show is known exactly."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

__all__ = ["Record", "causal_weights", "log_codes", "runs"]


def causal_weights(heads: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Weights (head, query, source) of causal heads of several kinds: previous, sink, broad."""
    generator = np.random.default_rng(seed)
    query, source = np.arange(tokens)[:, None], np.arange(tokens)[None]
    scores = generator.normal(size=(heads, tokens, tokens)) * 1.5
    kind = np.arange(heads) % 3
    scores[kind == 0] += 6.0 * (query - source == 1)
    scores[kind == 1, :, 0] += 5.0
    scores[:, query < source] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def log_codes(weights: np.ndarray, steps: int = 16) -> bytes:
    """One byte a weight: 0 is zero, 255 NaN, code c is 2 ** (-(c - 1) / steps)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.clip(np.round(1 - steps * np.log2(weights)), 1, 254)
    codes = np.where(weights > 0, codes, 0)
    return np.where(np.isnan(weights), 255, codes).astype(np.uint8).tobytes()


def runs(allowed: np.ndarray) -> bytes:
    """The allowed runs of every row."""
    found = []
    for row in allowed:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], row, [False]])))
        found.append(struct.pack(f"<{1 + len(edges)}I", len(edges) // 2, *edges))
    return b"".join(found)


class Record:
    """A header and chunks that grow by `layer`."""

    def __init__(self, tokens: list[str] | None, *, title: str = "A record", **axis: Any) -> None:
        self.chunks: dict[str, bytes] = {}
        labels = None if tokens is None else [tokens]
        self.header: dict[str, Any] = {
            "schema": "clearhead.view",
            "version": 1,
            "kind": "attention",
            "title": title,
            "made_by": "synthetic",
            "notes": [],
            "holds": ["All weights of every head."],
            "samples": 1,
            "axes": [{"name": "tokens", "labels": labels, **axis}],
            "layers": [],
            "statistics": [],
            "effects": [],
        }

    def finish(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        self.header["chunks"] = {name: len(data) for name, data in self.chunks.items()}
        return self.header, self.chunks

    def layer(
        self,
        weights: np.ndarray,
        *,
        heads: list[int] | None = None,
        allowed: np.ndarray | None = None,
        encoding: str | None = "f32",
        top: int = 0,
        planes: bool = False,
        cells: int = 0,
        prefix: str = "",
        **entry: Any,
    ) -> None:
        """Add a layer: weights are (head, query, source)."""
        many, queries, sources = weights.shape
        key = "other" if prefix else "layers"
        layers = self.header[key]["layers"] if prefix else self.header[key]
        index = len(layers)
        for head in range(many):
            place = f"{prefix}{{}}/0/{index}/{head}"
            if encoding:
                self.chunks[place.format("full")] = (
                    weights[head].astype("<f4").tobytes()
                    if encoding == "f32"
                    else log_codes(weights[head])
                )
            if top:
                pack = _planes if planes else _top
                self.chunks[place.format("top")] = pack(weights[head], top)
            if cells:
                self.chunks[place.format("block")] = _blocks(weights[head], cells)
            self.chunks[place.format("sums")] = weights[head].sum(-1).astype("<f4").tobytes()
        mask = None
        if allowed is not None:
            mask = f"mask/0/{index}"
            self.chunks[prefix + mask] = runs(allowed)
        layers.append(
            {
                "layer": index,
                "module": f"layers.{index}.attention",
                "call": 0,
                "kind": "self",
                "heads": list(range(many)) if heads is None else heads,
                "queries": queries,
                "sources": sources,
                "query_axis": 0,
                "source_axis": 0,
                "rows": None,
                "offset": sources - queries,
                "mask": mask,
                "check": 1e-7,
                "encoding": encoding,
                "top": top,
                "top_encoding": "planes" if planes else "f16",
                "top_steps": 6,
                "cells": cells,
                "sums": True,
                **entry,
            }
        )

    def statistics(self, **values: np.ndarray) -> None:
        """Add statistics, each (layer entry, head)."""
        self.header["statistics"] = [
            {
                "name": name,
                "label": name.replace("_", " "),
                "unit": "share of the row",
                "definition": f"The mean over the rows of the weight that {name} names.",
                "paper": "A paper, 2022",
            }
            for name in values
        ]
        stacked = np.stack(list(values.values()))[:, None]
        self.chunks["statistics"] = stacked.astype("<f4").tobytes()


def _largest(weights: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    sources = np.argsort(-weights, axis=-1, kind="stable")[:, :top]
    values = np.take_along_axis(weights, sources, -1)
    return np.where(values > 0, sources, -1), values


def _top(weights: np.ndarray, top: int) -> bytes:
    sources, values = _largest(weights, top)
    return sources.astype(np.int64).astype("<u2").tobytes() + values.astype("<f2").tobytes()


def _planes(weights: np.ndarray, top: int) -> bytes:
    sources, values = _largest(weights, top)
    last = np.where(sources < 0, np.iinfo(np.int64).max, sources)
    order = np.argsort(last, axis=-1, kind="stable")
    sources = np.take_along_axis(sources, order, -1)
    values = np.take_along_axis(values, order, -1)
    known = np.maximum.accumulate(np.maximum(sources, 0), axis=-1)
    steps = np.diff(known, axis=-1, prepend=0).T
    low, high = (steps & 255).astype(np.uint8), (steps >> 8).astype(np.uint8)
    return low.tobytes() + high.tobytes() + log_codes(np.where(sources < 0, 0, values).T, 6)


def _blocks(weights: np.ndarray, cells: int) -> bytes:
    queries, sources = weights.shape
    down = np.array_split(np.arange(queries), min(cells, queries))
    across = np.array_split(np.arange(sources), min(cells, sources))
    by_row = np.stack([weights[rows].sum(0) for rows in down])
    sums = np.stack([by_row[:, columns].sum(1) for columns in across], 1)
    edges = np.array([len(r) for r in down])[:, None] * np.array([len(c) for c in across])
    top_row = np.stack([weights[rows].max(0) for rows in down])
    top = np.stack([top_row[:, columns].max(1) for columns in across], 1)
    return log_codes(sums / edges) + log_codes(top)
