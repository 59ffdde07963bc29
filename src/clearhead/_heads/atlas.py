"""The atlas: which heads are sinks, previous-token, induction, ..., and which are redundant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from clearhead._heads.moments import Moments
from clearhead.heads import groups

__all__ = ["ROLES", "atlas", "pooled"]

# A head has a role where its mean of this statistic reaches the threshold; the mark is its sign in
# the picture, and the first role in this order is drawn.
ROLES = {
    "previous": ("P", "previous token"),
    "induction": ("I", "induction"),
    "duplicate": ("D", "duplicate token"),
    "self": ("=", "own position"),
    "sink": ("S", "sink"),
    "precursor": ("B", "token before an earlier occurrence"),
    "entropy_normalized": ("~", "even"),
    "local": ("L", "local"),
}
# Much of a short text is local. A first row, which has one source, is never even.
_OWN_THRESHOLD = {"local": 0.9, "entropy_normalized": 0.95}
# In running text most repeats are chance, and there such a head rests on its sink.
_HALF = ("induction", "duplicate", "precursor")


def pooled(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """Give the rows of a table by (layer, head) and statistic; documents are added up."""
    found: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    for row in rows:
        if not row["count"]:
            continue
        head = found[row["layer"], row["head"]]
        before = head.get(row["statistic"])
        head[row["statistic"]] = dict(row) if before is None else _added(before, row)
    return dict(sorted(found.items()))


def _added(left: dict[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    if left["variance"] is None or right["variance"] is None:
        return left
    both = _moments(left).merge(_moments(right))
    sums = {"count": int(both.count), "mean": float(both.mean), "variance": float(both.variance)}
    return {**left, **sums}


def _moments(row: Mapping[str, Any]) -> Moments:
    count, mean, variance = (
        torch.tensor(float(row[name]), dtype=torch.float64)
        for name in ("count", "mean", "variance")
    )
    return Moments(count, mean, variance * count)


def atlas(
    rows: Iterable[Mapping[str, Any]], *, threshold: float = 0.4, alike: float = 0.9
) -> dict[str, Any]:
    """Say for every head what it does, and which heads of a layer look alike.

    `threshold` is the mean weight from which a head has a role; half of it does for those that ask
    for repeated tokens. `alike` is the mean cosine from which two heads are redundant.
    """
    heads = [_head(*place, found, threshold) for place, found in pooled(rows).items()]
    return {
        "threshold": threshold,
        "alike": alike,
        "heads": heads,
        "roles": {role: _ranked(heads, role) for role in ROLES},
        "redundant": _redundant(heads, alike),
    }


def _head(layer: int, head: int, found: dict[str, Any], threshold: float) -> dict[str, Any]:
    means = {name: row["mean"] for name, row in found.items()}
    roles = [role for role in ROLES if means.get(role, 0.0) >= _least(role, threshold)]
    module = next(iter(found.values()))["module"]
    return {"layer": layer, "head": head, "module": module, "roles": roles, "means": means}


def _least(role: str, threshold: float) -> float:
    return _OWN_THRESHOLD.get(role, threshold / 2 if role in _HALF else threshold)


def _ranked(heads: list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    having = [head for head in heads if role in head["roles"]]
    having.sort(key=lambda head: -head["means"][role])
    return [
        {"layer": head["layer"], "head": head["head"], "mean": head["means"][role]}
        for head in having
    ]


def _redundant(heads: list[dict[str, Any]], alike: float) -> list[dict[str, Any]]:
    layers: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for head in heads:
        layers[head["layer"]].append(head)
    found = []
    for layer, members in layers.items():
        size = 1 + max(head["head"] for head in members)
        overlap = torch.zeros(size, size, dtype=torch.float64)
        for head in members:
            for name, mean in head["means"].items():
                if name.startswith("overlap."):
                    overlap[head["head"], int(name.partition(".")[2])] = mean
        found += [{"layer": layer, "heads": group} for group in groups(overlap, alike)]
    return found
