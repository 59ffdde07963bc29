"""The atlas: which heads are sinks, previous-token, induction, ..., and which are redundant."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from clearhead._core import type_error

__all__ = ["ROLES", "atlas", "cut_calls", "groups", "pooled"]

# A head has a role where its mean of this statistic reaches the threshold. The letter marks it in
# the picture, which draws the first role in this order.
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
# The edges of a role in Python, where it is a set of edges.
_EDGES = {
    "previous": "ch.masks.diagonal(1)",
    "induction": "ch.masks.induction(tokens)",
    "duplicate": "ch.masks.duplicate(tokens)",
    "self": "ch.masks.diagonal(0)",
    "sink": "ch.masks.first(1)",
}
# Much of a short text is local. A first row, which has one source, lowers the mean of even heads.
_OWN_THRESHOLD = {"local": 0.9, "entropy_normalized": 0.95}
# In running text most repeats are chance; there such a head attends to its sink.
_HALF = ("induction", "duplicate", "precursor")


def pooled(table: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the rows of an Arrow table by (layer, head) and statistic; documents are pooled."""
    first, rows, of_row = _first_rows(table)
    count, mean, variance = (
        torch.from_numpy(table[name].take(rows).to_numpy().astype("float64"))
        for name in ("count", "mean", "variance")
    )
    total = torch.bincount(of_row, count)
    means = torch.bincount(of_row, count * mean) / total
    # Around the overall mean, so that no large sums are subtracted.
    spread = count * (variance + (mean - means[of_row]).square())
    variances = torch.bincount(of_row, spread) / total
    found: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    columns = zip(table.take(first).to_pylist(), total, means, variances, strict=True)
    for row, *numbers in columns:
        n, m, v = map(float, numbers)
        v = None if row["variance"] is None else v
        sums = {"count": int(n), "mean": m, "variance": v}
        found[row["layer"], row["head"]][row["statistic"]] = {**row, **sums}
    return dict(sorted(found.items()))


def _first_rows(table: Any) -> tuple[Any, Any, Tensor]:
    """The first row of each (layer, head, statistic), the rows that count, and which it is."""
    rows = table["count"].to_numpy().nonzero()[0]
    names = table["statistic"].unify_dictionaries().combine_chunks().dictionary_encode()
    layer, head, name = (
        torch.from_numpy(column.take(rows).to_numpy().astype("int64"))
        for column in (table["layer"], table["head"], names.indices)
    )
    heads = int(head.max()) + 1 if len(head) else 1
    key = (layer * heads + head) * len(names.dictionary) + name
    of_row = key.unique(return_inverse=True)[1]
    first = torch.full((int(of_row.max()) + 1 if len(of_row) else 0,), len(of_row))
    first.scatter_reduce_(0, of_row, torch.arange(len(of_row)), "amin")
    return rows[first.numpy()], rows, of_row


def atlas(table: Any, *, threshold: float = 0.4, alike: float = 0.9) -> dict[str, Any]:
    """Assign roles to every head, and group the heads of a layer with similar maps.

    `threshold` is the least mean weight for a role, and half of it for the roles that depend on
    repeated tokens. `alike` is the least mean cosine of two redundant heads.
    """
    heads = [_head(*place, found, threshold) for place, found in pooled(table).items()]
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


def cut_calls(about: dict[str, Any], found: dict[str, Any], most: int) -> dict[str, str]:
    """Return the Python calls that cut the heads of each role, at most `most` of each.

    A role that is a set of edges loses those edges; the heads of any other role are ablated.
    "model" loads the model; a call holds for a `with` block in which the model reads `tokens`.
    """
    calls = {}
    for role, having in found["roles"].items():
        heads = [(head["layer"], head["head"]) for head in having[:most]]
        if heads and role in _EDGES:
            calls[role] = f"ch.knockout(model, {_EDGES[role]}, heads={heads})"
        elif heads:
            calls[role] = f"ch.ablate(model, {heads})"
    if not calls:
        return {}
    spec = about.get("spec", about["model"])
    return {"model": f"model = ch.models.load({'' if spec is None else repr(spec)})", **calls}


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


def groups(overlap: Tensor, threshold: float = 0.9) -> list[list[int]]:
    """Group the heads of a layer with similar maps: those with a cosine of at least `threshold`.

    >>> import torch
    >>> overlap = torch.tensor([[1.0, 0.1, 0.95], [0.1, 1.0, 0.2], [0.95, 0.2, 1.0]])
    >>> groups(overlap)
    [[0, 2]]

    A group is a connected component of such pairs; heads similar to no other are left out.
    """
    if not isinstance(overlap, Tensor):
        got, hint = type(overlap).__name__, "groups(survey.overlap[layer]) takes one layer"
        raise type_error("overlap", "is a tensor, (head, head)", got=got, hint=hint)
    left, found = set(range(len(overlap))), []
    while left:
        group, fresh = set(), {min(left)}
        while fresh:
            group |= fresh
            near = {j for i in fresh for j in left if overlap[i, j] >= threshold}
            fresh = near - group
        left -= group
        if len(group) > 1:
            found.append(sorted(group))
    return found
