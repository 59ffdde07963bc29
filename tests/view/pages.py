"""The records that the browser opens, each by name with the numbers that made it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from tests.view.synthetic import Record, causal_weights, runs

__all__ = ["HOSTILE", "RECORDS", "WEIGHTS"]

HOSTILE = [
    "</script><script>window.seen.ran=true</script>",
    "<!--",
    "<img src=x onerror='window.seen.ran=true'>",
    "\"'`${window.seen.ran=true}",
    "\u2028\u2029",
    "\x00\x1b[31m",
    "\ud800",
    "\u202eevil\u202c",
    "\u200b\u200d\ufeff",
    "x" * 1_000_000,
    "}*{display:none}url(http://example.invalid/x)",
    '{"a": [1, "</script>"]}',
    "a" + "\u0301" * 5000,
    "=HYPERLINK(1)",
    "مرحبا",
    "👩‍👩‍👧",
    "",
    "\n",
]


def _tokens(n: int) -> list[str]:
    return [f"t{i}" for i in range(n)]


def _lower(n: int) -> np.ndarray:
    return np.tril(np.ones((n, n), dtype=bool))


WEIGHTS: dict[str, np.ndarray] = {
    "plain": causal_weights(3, 7),
    "top": causal_weights(2, 41, seed=1),
    "large": causal_weights(2, 301, seed=2),
    "cross": np.random.default_rng(3).dirichlet(np.ones(11), (2, 5)).astype(np.float32),
    "one": np.ones((1, 1, 1), np.float32),
    "other": causal_weights(3, 7, seed=9),
    "live": causal_weights(2, 60, seed=4),
}
BROKEN = WEIGHTS["plain"].copy()
BROKEN[:, 4] = np.nan
BROKEN[:, 2] = 0
EMPTY = _lower(7)
EMPTY[2] = False


def plain() -> Record:
    record = Record(_tokens(7), title="Seven tokens", segments=[[0, 3, "system"], [3, 7, "user"]])
    for index in (0, 1):
        record.layer(np.roll(WEIGHTS["plain"], index, 0), allowed=_lower(7), heads=[0, 3, 8])
    sink = np.array([[0.1, 0.9, 0.5], [0.8, 0.2, np.nan]])
    record.statistics(sink=sink, previous=1 - sink)
    effect = {"sample": 0, "query": 6, "layer": 0, "head": 0, "weight": 0.1, "metric": "logit"}
    record.header["effects"] = [{**effect, "source": 5, "effect": -1.25}]
    return record


def top(planes: bool) -> Record:
    record = Record(_tokens(41))
    record.layer(WEIGHTS["top"], allowed=_lower(41), encoding=None, top=4, planes=planes)
    return record


def large() -> Record:
    record = Record(_tokens(301))
    record.layer(WEIGHTS["large"], allowed=_lower(301), encoding=None, top=4, cells=16)
    return record


def coded() -> Record:
    record = Record(_tokens(41))
    record.layer(WEIGHTS["top"], allowed=_lower(41), encoding="log8")
    return record


def cross() -> Record:
    record = Record(_tokens(5))
    record.header["axes"].append({"name": "encoder", "labels": [[f"s{i}" for i in range(11)]]})
    record.layer(WEIGHTS["cross"], kind="cross", source_axis=1, offset=0)
    return record


def patches() -> Record:
    record = Record(None, grid=[2, 3])
    record.layer(causal_weights(1, 7))
    return record


def broken() -> Record:
    record = Record(_tokens(7))
    record.layer(BROKEN, allowed=EMPTY)
    return record


def compared() -> Record:
    record = Record(_tokens(7))
    record.layer(WEIGHTS["plain"], allowed=_lower(7))
    names = {"title": "both", "name": "before", "other_name": "after"}
    record.header["other"] = {**names, "layers": []}
    record.layer(WEIGHTS["other"], allowed=_lower(7), prefix="other/")
    return record


def generated() -> Record:
    record = Record(_tokens(7), prompt=4)
    record.layer(WEIGHTS["plain"][:, 4:], rows=None)
    return record


def selected() -> Record:
    """Rows of three queries, layers and heads with numbers of their own."""
    record = Record(_tokens(7))
    record.layer(
        WEIGHTS["plain"][:, [1, 4, 6]],
        layer=11,
        heads=[2, 5, 7],
        rows=[1, 4, 6],
        queries=7,
        offset=0,
    )
    return record


def batch() -> Record:
    record = Record(_tokens(7))
    record.layer(WEIGHTS["plain"])
    record.header["samples"] = 2
    record.header["axes"][0]["labels"].append([f"u{i}" for i in range(7)])
    for head in range(3):
        second = WEIGHTS["other"][head].astype("<f4")
        record.chunks[f"full/1/0/{head}"] = second.tobytes()
        record.chunks[f"sums/1/0/{head}"] = second.sum(-1).tobytes()
    return record


def hostile() -> Record:
    title = "</title><script>window.seen.ran=true</script>"
    record = Record(HOSTILE, title=title, segments=[[0, 18, HOSTILE[0]]])
    record.header["notes"] = [HOSTILE[2]]
    record.layer(causal_weights(1, len(HOSTILE)), allowed=_lower(len(HOSTILE)), module=HOSTILE[0])
    return record


def tall() -> Record:
    record = Record(["same"] * 5)
    for index in range(100):
        record.layer(causal_weights(1, 5, seed=index))
    return record


def one() -> Record:
    record = Record(["only"])
    record.layer(WEIGHTS["one"])
    return record


def nothing() -> Record:
    record = Record([])
    record.layer(np.zeros((2, 0, 0), np.float32))
    return record


def mask() -> Record:
    record = Record(_tokens(7), title="causal() & window(3)")
    distance = np.arange(7)[:, None] - np.arange(7)[None]
    near = (distance < 3) & (distance > -9)
    record.layer(np.zeros((1, 7, 7), np.float32), allowed=_lower(7) & near, encoding=None)
    record.chunks = {name: data for name, data in record.chunks.items() if name.startswith("mask")}
    record.chunks |= {"part/0": runs(_lower(7)), "part/1": runs(near)}
    parts = [{"name": "causal()", "mask": "part/0"}, {"name": "window(3)", "mask": "part/1"}]
    record.header["kind"] = "mask"
    record.header["layers"][0]["parts"] = parts
    return record


def atlas() -> Record:
    record = Record(None, title="Atlas")
    for index in range(3):
        record.layer(np.zeros((4, 1, 1), np.float32), encoding=None, layer=index + 20)
    record.chunks = {}
    values = np.arange(12).reshape(3, 4) / 12
    record.statistics(sink=values, entropy=3 - values)
    record.header["kind"] = "atlas"
    return record


def wide(tokens: int = 4096, layers: int = 30, heads: int = 9) -> Record:
    """The shape of a record of SmolLM2: the largest weights and block maps of 270 heads."""
    record = Record([f"␣w{i % 371}" for i in range(tokens)], title="4,096 tokens, 270 heads")
    generator = np.random.default_rng(0)
    causal = b"".join(struct.pack("<3I", 1, 0, i + 1) for i in range(tokens))
    record.chunks["mask/0/0"] = causal
    entry: dict[str, Any] = {"encoding": None, "top": 16, "top_encoding": "planes", "cells": 64}
    for layer in range(layers):
        record.layer(np.zeros((heads, 1, 1), np.float32), encoding=None)
        record.header["layers"][layer] |= {
            **entry,
            "queries": tokens,
            "sources": tokens,
            "offset": 0,
            "mask": "mask/0/0",
            "sums": False,
        }
        for head in range(heads):
            place = f"0/{layer}/{head}"
            del record.chunks[f"sums/{place}"]
            steps = generator.integers(0, 3, (16, tokens), dtype=np.uint8)
            codes = generator.integers(8, 60, (16, tokens), dtype=np.uint8)
            codes[np.cumsum(steps, 0) > np.arange(tokens)] = 0
            record.chunks[f"top/{place}"] = steps.tobytes() + bytes(16 * tokens) + codes.tobytes()
            blocks = np.tril(generator.integers(1, 250, (2, 64, 64), dtype=np.uint8))
            record.chunks[f"block/{place}"] = blocks.tobytes()
    values = generator.random((layers, heads))
    record.statistics(sink=values, previous=1 - values)
    return record


def live() -> Record:
    """Nothing but the rows that are asked for, 60 tokens of two heads."""
    record = Record(_tokens(60), title="Live")
    record.layer(WEIGHTS["live"], allowed=_lower(60), encoding=None, cells=4)
    for head in range(2):
        for query in range(60):
            row = WEIGHTS["live"][head, query].astype("<f4").tobytes()
            record.chunks[f"row/0/0/{head}/{query}"] = row
    for head in range(2):
        for source in range(60):
            column = WEIGHTS["live"][head, :, source].astype("<f4").tobytes()
            record.chunks[f"column/0/0/{head}/{source}"] = column
    record.header["layers"][0]["live"] = True
    return record


def damaged() -> Record:
    record = Record(_tokens(7))
    record.layer(WEIGHTS["plain"])
    del record.chunks["full/0/0/1"]
    return record


def unlike() -> Record:
    """Two records whose layers do not fit each other."""
    record = Record(_tokens(7))
    record.layer(WEIGHTS["plain"])
    record.header["other"] = {"title": "", "name": "a", "other_name": "b", "layers": []}
    record.layer(WEIGHTS["top"], prefix="other/")
    return record


RECORDS = {
    "live": live,
    "damaged": damaged,
    "unlike": unlike,
    "plain": plain,
    "top": lambda: top(False),
    "planes": lambda: top(True),
    "large": large,
    "coded": coded,
    "cross": cross,
    "patches": patches,
    "broken": broken,
    "compared": compared,
    "generated": generated,
    "selected": selected,
    "batch": batch,
    "hostile": hostile,
    "tall": tall,
    "one": one,
    "nothing": nothing,
    "mask": mask,
    "atlas": atlas,
}
