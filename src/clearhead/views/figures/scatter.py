"""The weight of each cut against its effect."""

from __future__ import annotations

from typing import Any

from clearhead.views.figures.style import SERIES, PaperFigure, in_lines, token

__all__ = ["draw_effects"]

# Cuts that bear their names: those with the largest effects.
NAMED = 6


def draw_effects(effects: Any, *, tokens: Any, title: str | None, **_: Any) -> PaperFigure:
    """Draw one point a cut; those with the largest effects are named."""
    made = PaperFigure(figsize=(4.2, 3.2), layout="constrained")
    axes = made.add_subplot()
    axes.grid(color="#e8e8e8", linewidth=0.5)
    axes.axhline(0, color="#666666", linewidth=0.6)
    weights, changes = [row.weight for row in effects], [row.effect for row in effects]
    axes.scatter(weights, changes, s=18, color=SERIES[0], alpha=0.8, linewidths=0)
    labels = None if tokens is None else list(tokens)
    middle = (min(weights, default=0) + max(weights, default=0)) / 2
    for row in _named(effects):
        side, gap = ("right", -4) if row.weight > middle else ("left", 4)
        axes.annotate(_name(row.cut, effects.heads, labels), (row.weight, row.effect), ha=side,
                      xytext=(gap, 3), textcoords="offset points", fontsize=7)  # fmt: skip
    axes.set(xlabel="weight", ylabel="effect of the cut on the metric")
    axes.set_title(in_lines(title or "Weight against effect", 48))
    made.supxlabel(in_lines(effects.words, 62), fontsize=7, x=0.02, ha="left")
    axes.margins(x=0.15, y=0.12)
    return made


def _named(effects: Any) -> list[Any]:
    """The cuts that stand out: the largest effects, and the largest weight."""
    ordered = sorted(effects, key=lambda row: -abs(row.effect))
    out = [row for row in ordered[:NAMED] if abs(row.effect) >= 0.05 * abs(ordered[0].effect)]
    heaviest = max(effects, key=lambda row: row.weight, default=None)
    return out if heaviest is None or heaviest in out else [*out, heaviest]


def _name(cut: Any, heads: bool, labels: list[str] | None) -> str:
    """A head as L.H; a position by its label, where there is one."""
    if heads:
        return f"{cut[0]}.{cut[1]}"
    if isinstance(cut, int):
        return f"{cut} {token(labels[cut])}" if labels else str(cut)
    if isinstance(cut, tuple):
        return " → ".join(_name(position, False, labels) for position in cut)
    return token(str(cut))
