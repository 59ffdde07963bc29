"""What `look` adds to the weights: the prediction without each of the strongest sources."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.views.reader import Reader

# So many of the strongest sources are cut one by one; the rank correlation is over these.
LIMIT = 16


def difference(
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

    import clearhead as ch

    strongest = weights.topk(min(max(top, LIMIT), weights.shape[-1]))
    sources = [
        source
        for source, weight in zip(
            strongest.indices.tolist(), strongest.values.tolist(), strict=True
        )
        if weight > 0
    ]
    edges = [(at, source) for source in sources]
    found = ch.effects(reader.model, (torch.tensor([ids]),), edges=edges, heads=heads, position=at)
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


def render(seen: dict[str, Any], console: Any) -> None:
    """Draw the part."""
    from rich.table import Table
    from rich.text import Text

    found = seen["difference"]
    best = seen["predictions"][0]["label"]
    console.print(
        Text.assemble(
            "\nWhat difference does it make? The probability of ", (best, "bold"),
            f" when position {seen['at']} cannot read one source, in {found['where']}"
            f" (without a cut: {found['probability']:.3f})",
        )
    )  # fmt: skip
    table = Table(box=None, padding=(0, 2, 0, 1), header_style="dim")
    over = found["mean_over"].replace(", ", ",\n")
    for name in ("", "source", over, "probability", "change"):
        table.add_column(name, justify="left" if name == "source" else "right", no_wrap=True)
    for row in found["sources"]:
        style = (
            "bold red" if row["change"] < -0.05 else "bold green" if row["change"] > 0.05 else ""
        )
        table.add_row(
            Text(str(row["position"]), style="dim"),
            Text(row["label"], style="bold"),
            f"{row['weight']:.3f}",
            f"{row['probability']:.3f}",
            Text(f"{row['change']:+.3f}", style=style),
        )
    console.print(table)
    console.print(_verdict(found, len(seen["tokens"])))


def _verdict(found: dict[str, Any], tokens: int) -> str:
    """Say how good a guide the weights were, and over how many sources that was found."""
    words, tried = found["words"], found["compared"]
    words = words[0].upper() + words[1:]
    if "rank correlation" not in words:
        return f"{words}."
    over = f"{tried} of the {tokens} tokens" if tried < tokens else f"all {tokens} tokens"
    if len(found["sources"]) < tried:
        over += f" ({len(found['sources'])} shown)"
    return f"{words}, over {over}."
