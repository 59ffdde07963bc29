"""One number a head: the atlas of statistics, and how far back heads look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from clearhead._core import value_error
from clearhead.heads import STATISTICS, Survey, atlas
from clearhead.readings import Distance
from clearhead.views.figures.style import SERIES, PaperFigure, in_lines, palette

__all__ = ["draw_atlas", "draw_distance"]

# What an atlas shows unless a statistic is chosen, as far as it is known.
USUAL = ("sink", "previous", "induction", "entropy")
PANELS = 4

Means = Mapping[tuple[int, int], float]


def draw_atlas(
    shown: Any, *, statistic: str | None, sample: int, title: str | None, **_: Any
) -> PaperFigure:
    """Draw statistics as maps of layers and heads."""
    known = _of_heads(shown, sample)
    usual = [name for name in USUAL if name in known][:PANELS]
    names = usual if statistic is None else [statistic]
    if missing := [name for name in names if name not in known] or not names:
        got, rule = repr(missing), f"is one of {', '.join(known) or 'none: watch with Weights()'}"
        raise value_error("statistic", rule, got=got)
    places = sorted({place for name in names for place in known[name]})
    layers, heads = (sorted({place[at] for place in places}) for at in (0, 1))
    inches = (max(1.6, 0.24 * len(heads) + 0.9) * len(names), max(1.5, 0.17 * len(layers) + 0.9))
    made = PaperFigure(figsize=(min(inches[0], 11), min(inches[1], 9)), layout="compressed")
    for number, name in enumerate(names):
        axes = made.add_subplot(1, len(names), number + 1)
        _panel(made, axes, known[name], layers, heads)
        axes.set_title(name.replace("_", " "))
        axes.set_ylabel("layer" if number == 0 else "")
    if title:
        made.suptitle(in_lines(title, 80))
    return made


def _panel(made: Any, axes: Any, means: Means, layers: list[int], heads: list[int]) -> None:
    values = np.full((len(layers), len(heads)), np.nan)
    for (layer, head), mean in means.items():
        values[layers.index(layer), heads.index(head)] = mean
    axes.patch.set(facecolor="white", edgecolor="#c4c4c4", hatch="//////", linewidth=0)
    drawn = np.ma.masked_invalid(values)
    image = axes.imshow(drawn, cmap=palette(), vmin=0, aspect="auto", interpolation="nearest")
    for set_ticks, numbers in ((axes.set_yticks, layers), (axes.set_xticks, heads)):
        every = next(n for n in (1, 2, 5, 10, 20, 50, 10**9) if len(numbers) / n <= 12)
        set_ticks(range(0, len(numbers), every), [str(n) for n in numbers[::every]])
    axes.set_xlabel("head")
    made.colorbar(image, ax=axes, aspect=30, pad=0.02).outline.set_linewidth(0.4)


def draw_distance(shown: Any, *, sample: int, title: str | None, **_: Any) -> PaperFigure:
    """Draw the mean distance of each head, in positions, by layer."""
    means = _distances(shown, sample)
    known = {place: mean for place, mean in means.items() if not np.isnan(mean)}
    made = PaperFigure(figsize=(4.6, 2.8), layout="constrained")
    axes = made.add_subplot()
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.5)
    layers = sorted({layer for layer, _ in means})
    points = [(layer, mean) for (layer, _), mean in known.items()]
    axes.scatter(*zip(*points, strict=True) if points else ((), ()), s=14, color=SERIES[0],
                 alpha=0.75, linewidths=0, label="one head")  # fmt: skip
    middle = [np.mean([m for (at, _), m in known.items() if at == x] or [np.nan]) for x in layers]
    axes.plot(layers, middle, color=SERIES[1], marker="_", linewidth=1, label="mean of the layer")
    ordered = sorted(known, key=lambda place: known[place])
    for layer, head in {*ordered[:1], *ordered[-1:]}:
        axes.annotate(f"{layer}.{head}", (layer, known[layer, head]), xytext=(4, 0),
                      textcoords="offset points", fontsize=7, va="center")  # fmt: skip
    axes.set(xlabel="layer", ylabel="mean distance (positions)", ylim=(0, None))
    axes.set_title(in_lines(title or "How far back each head looks", 60))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=7)
    return made


def _distances(shown: Any, sample: int) -> Means:
    if isinstance(shown, Survey) or hasattr(shown, "column_names"):
        return _of_heads(shown, sample)["distance"]
    found: dict[tuple[int, int], float] = {}
    for call in shown.layers:
        means = _distance(call)[min(sample, call.sizes.batch - 1)]
        found |= {(call.layer, h): float(m) for h, m in zip(call.heads, means, strict=True)}
    return found


def _distance(call: Any) -> Tensor:
    """The mean distance of each head, (sample, head), as it was read or from all weights."""
    for reading, value in call.read:
        if isinstance(reading, Distance):
            return value.float().mean(-1).cpu()
    if call.weights is None or call.kind != "self":
        rule = "holds Distance, or all weights of self-attention"
        hint = "watch(model, read=(readings.TopK(16), readings.Distance()))"
        raise value_error("record", rule, got=f"layer {call.layer}", hint=hint)
    query, source = call.sizes[2:]
    rows = torch.arange(query) if call.rows is None else torch.tensor(call.rows)
    apart = (rows[:, None] + source - query - torch.arange(source)).abs()
    return (call.weights * apart).sum(-1).mean(-1)


def _of_heads(shown: Any, sample: int) -> dict[str, Means]:
    """The mean of each known statistic by layer and head."""
    if isinstance(shown, Survey):
        return {name: _places(shown.mean(name)) for name in STATISTICS}
    if hasattr(shown, "column_names"):
        heads = atlas(shown)["heads"]
        names = dict.fromkeys(n for head in heads for n in head["means"] if "." not in n)
        return {
            n: {(h["layer"], h["head"]): h["means"].get(n, np.nan) for h in heads} for n in names
        }
    content = shown.content()
    header = content.header
    names = [statistic["name"] for statistic in header["statistics"]]
    if not names:
        return {}
    values = np.frombuffer(content.chunk("statistics"), "<f4")
    values = values.reshape(len(names), header["samples"], len(header["layers"]), -1)
    return {
        name: {
            (entry["layer"], head): float(values[n, min(sample, header["samples"] - 1), e, h])
            for e, entry in enumerate(header["layers"])
            for h, head in enumerate(entry["heads"])
        }
        for n, name in enumerate(names)
    }


def _places(means: Tensor) -> Means:
    return {(n, h): float(x) for n, row in enumerate(means) for h, x in enumerate(row)}
