"""What `look` adds to the weights: the prediction without each of the strongest sources."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.views.reader import Reader

__all__ = ["difference_without", "predictions_without"]

# At most so many of the strongest sources are cut, one by one, for the rank correlation.
LIMIT = 16


def difference_without(
    reader: Reader,
    ids: list[int],
    at: int,
    weights: Tensor,
    names: list[str],
    heads: list[tuple[int, int]] | None,
    top: int,
) -> dict[str, Any]:
    """Cut the edge from the position to each of its strongest sources, in all heads at once.

    `weights` ranks the sources; `heads` are (layer, head) pairs, None for all of the model.
    """
    import torch

    from clearhead.intervention import effects

    edges = [(at, source) for source in _strongest(weights, max(top, LIMIT))]
    found = effects(reader.model, (torch.tensor([ids]),), edges=edges, heads=heads, position=at)
    rows = [_row(cut, found.before, names) for cut in found]
    correlation = found.rank_correlation
    return {
        "probability": math.exp(found.before),
        "sources": sorted(rows, key=lambda row: -row["weight"])[:top],
        "compared": len(rows),
        "rank_correlation": None if math.isnan(correlation) else correlation,
        "words": found.words,
    }


def predictions_without(
    reader: Reader,
    ids: list[int],
    at: int,
    logits: Tensor,
    heads: list[tuple[int, int]],
    top: int,
) -> list[dict[str, Any]]:
    """Ablate heads (their output is 0), and compare the best predictions with and without them."""
    from clearhead.intervention import ablate

    with ablate(reader.model, heads):
        cut = reader.predict(ids)
    assert cut is not None
    before, after = (each[at].float().softmax(-1) for each in (logits, cut))
    best = {*before.topk(min(top, len(before))).indices.tolist()}
    best |= {*after.topk(min(top, len(after))).indices.tolist()}
    rows = [
        {
            "id": id_,
            "label": reader.labels([id_])[0],
            "probability": float(before[id_]),
            "without": float(after[id_]),
            "change": float(after[id_] - before[id_]),
        }
        for id_ in best
    ]
    return sorted(rows, key=lambda row: (-row["probability"], row["id"]))


def _strongest(weights: Tensor, most: int) -> list[int]:
    best = weights.topk(min(most, weights.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [source for source, weight in pairs if weight > 0]


def _row(cut: Any, before: float, names: list[str]) -> dict[str, Any]:
    """One cut: its source, the weight on it, and the probability without it."""
    probability = math.exp(before + cut.effect)
    return {
        "position": cut.cut[1],
        "label": names[cut.cut[1]],
        "weight": cut.weight,
        "probability": probability,
        "change": probability - math.exp(before),
    }
