"""What `look` adds to the weights: the prediction without each of the strongest sources."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.views.reader import Reader

__all__ = ["difference_without"]

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

    strongest = weights.topk(min(max(top, LIMIT), weights.shape[-1]))
    sources = [
        source
        for source, weight in zip(
            strongest.indices.tolist(), strongest.values.tolist(), strict=True
        )
        if weight > 0
    ]
    edges = [(at, source) for source in sources]
    found = effects(reader.model, (torch.tensor([ids]),), edges=edges, heads=heads, position=at)
    before = math.exp(found.before)
    rows = [
        {
            "position": row.cut[1],
            "label": names[row.cut[1]],
            "weight": row.weight,
            "probability": math.exp(found.before + row.effect),
            "change": math.exp(found.before + row.effect) - before,
        }
        for row in found
    ]
    correlation = found.rank_correlation
    return {
        "probability": before,
        "sources": sorted(rows, key=lambda row: -row["weight"])[:top],
        "compared": len(rows),
        "rank_correlation": None if math.isnan(correlation) else correlation,
        "words": found.words,
    }
