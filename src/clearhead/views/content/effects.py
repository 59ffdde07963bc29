"""What cuts changed, as a page shows it beside the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from clearhead._core import is_number, type_error, value_error
from clearhead.intervention import Effect, Effects

__all__ = ["entries_of", "entries_of_look", "fitting"]


def entries_of(effects: Effects | Sequence[Effects]) -> list[dict[str, Any]]:
    """The header's entries of what `ch.effects` gave: edges, sources and heads.

    An edge has a query and a source, a cut source has no query, a head has neither. `layer` and
    `head` are None where several were cut at once, and `where` says which.
    """
    tables = [effects] if isinstance(effects, Effects) else effects
    listed = isinstance(tables, (list, tuple)) and bool(tables)
    if not listed or not all(isinstance(table, Effects) for table in tables):
        got = type(effects).__name__
        raise type_error("effects", "is what ch.effects gave, or a list of such", got=got)
    found = [entry for table in tables for row in table for entry in _entry(table, row)]
    if not found:
        hint = "ch.effects(model, inputs, edges=[(query, source), ...])"
        rule = "lists edges, sources or heads that were cut"
        raise value_error("effects", rule, got="masks alone", hint=hint)
    return found


def entries_of_look(looked: dict[str, Any]) -> list[dict[str, Any]]:
    """The header's entries of what `look_at` found of cuts; none for a model that predicts none."""
    found, best = looked["difference"], looked["predictions"]
    if found is None or not best or not found["probability"] > 0:
        return []
    where = {"sample": None, "layer": None, "head": None, "where": f"in {found['where']}"}
    metric = f"log-probability (nats) of “{best[0]['label']}” at position {looked['at']}"
    return [
        {**where, "query": looked["at"], "source": row["position"], "weight": row["weight"],
         "effect": math.log(row["probability"] / found["probability"]), "metric": metric}
        for row in found["sources"]
        if row["probability"] > 0
    ]  # fmt: skip


def fitting(
    entries: list[dict[str, Any]], query: int, source: int, offset: int = 0
) -> list[dict[str, Any]]:
    """Check that effects lie among the positions that are shown; queries become rows of the map."""
    for entry in entries:
        for name, size in (("query", query + offset), ("source", source)):
            if entry[name] is not None and not 0 <= entry[name] < size:
                rule = f"are of the {size} positions that are shown"
                raise value_error("effects", rule, got=f"{name} {entry[name]}")
    moved = ({**x, "query": None if x["query"] is None else x["query"] - offset} for x in entries)
    return [entry for entry in moved if entry["query"] is None or entry["query"] >= 0]


def _entry(table: Effects, row: Effect) -> Iterator[dict[str, Any]]:
    cut = row.cut
    place: dict[str, int | None] = dict.fromkeys(("query", "source", "layer", "head"))
    if table.heads:
        place |= {"layer": cut[0], "head": cut[1]}
    elif is_number(cut):
        place |= {"source": int(cut)}
    elif isinstance(cut, tuple) and len(cut) == 2 and all(map(is_number, cut)):
        place |= {"query": int(cut[0]), "source": int(cut[1])}
    else:
        return
    if not table.heads and table.within is not None:
        layers = {layer for layer, _ in table.within}
        place["layer"] = layers.pop() if len(layers) == 1 else None
        place["head"] = table.within[0][1] if len(table.within) == 1 else None
    numbers = {"weight": float(row.weight), "effect": float(row.effect)}
    yield {"sample": None, **place, **numbers, "metric": table.metric, "where": _where(table)}


def _where(table: Effects) -> str:
    if table.heads:
        return "the whole head"
    if table.within is None:
        return "in all layers and heads at once"
    names = [f"{layer}.{head}" for layer, head in table.within]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"in {'head' if len(names) == 1 else 'heads'} {', '.join(names[:8])}{more}"
