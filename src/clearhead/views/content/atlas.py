"""The atlas page: all layers and heads of a survey by statistic, with maps where a record is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from clearhead._core import value_error
from clearhead.heads import ROLES, Survey, pooled
from clearhead.views.content.chunks import PageContent
from clearhead.views.content.statistics import about, table_of
from clearhead.views.labels import many

__all__ = ["ShownAtlas", "atlas_of_survey", "atlas_of_table"]

Heads = Mapping[tuple[int, int], Mapping[str, float]]


@dataclass(frozen=True)
class ShownAtlas:
    """The mean of each statistic by (layer, head), what is said of heads, and a record of maps."""

    means: Heads
    modules: Mapping[int, str]
    roles: Mapping[tuple[int, int], list[str]]
    notes: tuple[str, ...]
    title: str
    record: Any = None  # a Shown

    @property
    def extent(self) -> str:
        """How much is shown, in words."""
        return many(len(self.means), "head")

    def check(self) -> None:
        """Refuse a record that shares no head with the table, and one that is too large."""
        if self.record is None:
            return
        own = {(x.layer, head) for x in self.record.layers for head in x.heads}
        own |= {(at, head) for at, x in enumerate(self.record.layers) for head in x.heads}
        if not own & self.means.keys():
            rule = "has heads of the table"
            got = f"layers {sorted({layer for layer, _ in own})[:8]}"
            raise value_error("record", rule, got=got, hint="watch the model that was scanned")
        self.record.check()

    def pages(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the header and all chunks."""
        return self.content().whole()

    def content(self, live: bool = False) -> PageContent:
        """The header, with what makes each chunk."""
        made = PageContent(_bare(), {}) if self.record is None else self.record.content(live)
        layers = list(made.header["layers"])
        numbers = _numbers(layers)
        missing = sorted(self.modules.keys() - set(numbers))
        layers += [self._entry(layer) for layer in missing]
        numbers += missing
        for number, entry in zip(numbers, layers, strict=True):
            entry["roles"] = [self.roles.get((number, head), []) for head in entry["heads"]]
        names = list(dict.fromkeys(name for found in self.means.values() for name in found))
        samples = made.header["samples"]
        places = list(zip(numbers, layers, strict=True))
        columns = [
            [self._values(n, x["heads"], name, samples) for n, x in places] for name in names
        ]
        heads = max((len(entry["heads"]) for entry in layers), default=0)
        held = made.header["holds"] if self.record else ["The statistics of every head; no maps."]
        header = made.header | {
            "kind": "atlas",
            "title": self.title,
            "notes": [*self.notes, *made.header["notes"]],
            "holds": held,
            "layers": layers,
            "statistics": [about(name) for name in names],
        }
        makers = made.makers | {"statistics": lambda: table_of(columns, samples, heads)}
        return PageContent(header, makers, made.asked)

    def _values(self, number: int, heads: list[int], name: str, samples: int) -> torch.Tensor:
        found = (self.means.get((number, head), {}).get(name) for head in heads)
        row = torch.tensor([torch.nan if value is None else value for value in found])
        return row.expand(samples, -1)

    def _entry(self, layer: int) -> dict[str, Any]:
        """A layer without maps."""
        plain = dict.fromkeys(("call", "queries", "sources", "query_axis", "source_axis"), 0)
        none = dict.fromkeys(("rows", "mask", "check", "encoding"))
        heads = sorted(head for at, head in self.means if at == layer)
        return {
            **{"layer": layer, "module": self.modules[layer], "kind": "self", "heads": heads},
            **{**plain, **none, "offset": 0, "top": 0, "cells": 0, "sums": False},
        }


def atlas_of_table(
    table: Any, judged: dict[str, Any], title: str, record: Any, words: str
) -> ShownAtlas:
    """Show an Arrow table that `clearhead scan` wrote, and what `heads.atlas` says of it."""
    means = {place: {n: row["mean"] for n, row in rows.items() if "." not in n}
             for place, rows in pooled(table).items()}  # fmt: skip
    modules = {head["layer"]: head["module"] for head in judged["heads"]}
    roles = {(h["layer"], h["head"]): [ROLES[r][1] for r in h["roles"]] for h in judged["heads"]}
    alike = [f"layer {x['layer']}: {' = '.join(map(str, x['heads']))}" for x in judged["redundant"]]
    notes = [words]
    if alike:
        notes.append(f"Redundant heads (cosine from {judged['alike']:g}): {'; '.join(alike)}.")
    return ShownAtlas(means, modules, roles, tuple(notes), title, record)


def atlas_of_survey(survey: Survey, title: str | None, record: Any) -> ShownAtlas:
    """Show what `heads.measure` gave."""
    means: dict[tuple[int, int], dict[str, float]] = {}
    modules = {}
    for row in survey.rows():
        modules[row.layer] = row.module
        if "." not in row.statistic:
            means.setdefault((row.layer, row.head), {})[row.statistic] = row.mean
    words = [
        f"Over {many(survey.sequences, 'sequence')}, {many(survey.tokens, 'token')}.",
        *survey.notes,
    ]
    if survey.looks_untrained:
        words.append("looks untrained: every head attends evenly; were the weights loaded?")
    return ShownAtlas(means, modules, {}, tuple(words), title or "Heads of a model", record)


def _numbers(layers: list[dict[str, Any]]) -> list[int]:
    """The layer of each call in a table, which counts calls where modules are called again."""
    again = any(entry["call"] for entry in layers)
    return [at if again else entry["layer"] for at, entry in enumerate(layers)]


def _bare() -> dict[str, Any]:
    return {
        "schema": "clearhead.view",
        "version": 1,
        "made_by": "clearhead",
        "notes": [],
        "holds": [],
        "samples": 1,
        "axes": [{"name": "tokens", "labels": None}],
        "layers": [],
        "effects": [],
        "chunks": {},
    }
