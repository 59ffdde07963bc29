"""effects(): the attention weight of an edge or head beside the effect of cutting it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch

from clearhead._capture import call_with
from clearhead._display import mimebundle
from clearhead.intervention.candidates import candidates, several
from clearhead.intervention.selection import Heads, Model, listed, select_heads
from clearhead.intervention.trials import Baseline, EdgeWeights, after_cuts, likelihood, number

__all__ = ["Effect", "Effects", "effects"]

# A rank correlation of fewer cuts has no meaning: that of two is always 1 or -1.
FEW = 5
# Effects up to this count as zero: of a log-probability in nats, or a share of another metric.
_NATS, _SHARE = 0.01, 1e-3


@dataclass(frozen=True)
class Effect:
    """One cut: the weight that lay there, and the change of the metric without it."""

    cut: Any  # (query, source), a source, a (layer, head) or a Mask
    weight: float
    effect: float


@dataclass(frozen=True)
class Effects(Sequence[Effect]):
    """One row a cut, in the order of the arguments, and the metric `before` any cut."""

    rows: list[Effect] = field(repr=False)
    before: float
    small: float = 0.0  # the largest effect that counts as none
    heads: bool = False  # whether the cuts are (layer, head)
    # The heads that lost the edges, as (layer, head); None where these are all of the model.
    within: tuple[tuple[int, int], ...] | None = None
    metric: str = ""  # what the effect is a change of, in words

    @overload
    def __getitem__(self, index: int) -> Effect: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Effect]: ...
    def __getitem__(self, index: int | slice) -> Effect | Sequence[Effect]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation of weight and absolute effect; NaN where one is constant."""
        return _spearman([row.weight for row in self], [abs(row.effect) for row in self])

    @property
    def words(self) -> str:
        """Describe how well the weight predicts the effect, where there are enough cuts to tell."""
        found = self.rank_correlation
        if len(self) < FEW:
            return f"compare weight and change by eye: fewer than {FEW} cuts are not ranked"
        if max(abs(row.effect) for row in self) <= self.small:
            return "here no cut makes a difference, whatever its weight"
        if math.isnan(found):
            return "here weight and effect vary too little to be compared"
        number = f"(rank correlation {found:.2f})"
        if found >= 0.8:
            return (
                f"here weight is a good guide: what has more weight makes more difference {number}"
            )
        if found >= 0.4:
            return f"here weight is a rough guide to what makes a difference {number}"
        if found <= -0.4:
            return f"here weight misleads: what has more weight makes less difference {number}"
        return f"here weight is a poor guide: it says little of what makes a difference {number}"

    def __str__(self) -> str:
        lines = [f"metric before: {self.before:.4f}", f"{'cut':<20} {'weight':>8} {'effect':>9}"]
        ordered = sorted(self, key=lambda row: -abs(row.effect))
        lines += [f"{self._cut(row):<20} {row.weight:8.4f} {row.effect:+9.4f}" for row in ordered]
        return "\n".join([*lines, self.words])

    _repr_mimebundle_ = mimebundle

    def _cut(self, row: Effect) -> str:
        if self.heads:
            return f"layer {row.cut[0]} head {row.cut[1]}"
        return repr(row.cut)


def effects(
    model: Model,
    inputs: Any,
    *,
    edges: Any = None,
    sources: Sequence[int] | None = None,
    heads: Heads = None,
    layers: int | Sequence[int] | None = None,
    metric: Callable[[Any], Any] | None = None,
    position: int = -1,
    batch: int | None = None,
) -> Effects:
    """Cut edges, sources or heads one at a time; compare their weights with the effects.

    >>> import torch, clearhead as ch
    >>> model = ch.models.load()
    >>> tokens = model.vocabulary.encode("hell")[None]
    >>> table = ch.effects(model, tokens, edges=[(3, 0), (3, 1), (3, 2)])
    >>> table[0].cut, table[0].weight > 0
    ((3, 0), True)

    What is cut, each in a row of its own:

    - `edges`: a list of (query, source) pairs or of masks, each cut in all chosen layers and heads;
    - `sources`: positions, each cut from every query but its own;
    - neither: each of the chosen heads, as a whole, or only its `edges` where that is one mask.

    The weight of edges is summed over the sources of each query that has such an edge, and averaged
    over those queries, the heads and the samples. The weights of a whole head sum to one in each
    row; its weight here is its confidence, the mean of the largest weight (Voita et al. 2019).

    - `metric`: a function of the model's output that returns one number; by default the
      log-probability (in nats) of the token that the model, without cuts, predicts at `position`.
      The effect is the metric after the cut minus the metric before.
    - `layers`, `heads`: as in `knockout`.
    - `batch`: how many cuts share a forward; as many as fit into moderate memory unless given.

    The last line of the table, `words`, describes how well the weight predicts the effect. An edge
    that no call has, such as one of the future in a causal model, is a ValueError.

    Several cuts share a forward where samples, along the first axis of the inputs, do not affect
    each other in the model; otherwise each cut has a forward of its own.
    """
    edges = listed(edges)
    with torch.no_grad():
        baseline = Baseline(model, inputs)
        where = select_heads(layers, heads)
        where.check(baseline.cutter.totals, baseline.cutter.names)
        by_head = sources is None and not several(edges)
        found = candidates(edges, sources, where, baseline.cutter.totals)
        measure = likelihood(baseline.output, position) if metric is None else metric
        before = number(measure(baseline.output))
        weights = EdgeWeights(found)
        with weights.watching(model):
            call_with(model, inputs)
        weights.check(every=not by_head)
        step = baseline.cuts_per_forward(inputs) if batch is None else batch
        after = after_cuts(model, inputs, found, measure, max(step, 1), before)
    named = zip(found, weights.values(), after, strict=True)
    rows = [Effect(one.name, weight, value - before) for one, weight, value in named]
    small = _NATS if metric is None else _SHARE * abs(before)
    within = None if where.whole else where.listed(baseline.cutter.totals)
    return Effects(rows, before, small, by_head, within, _words(metric, position))


def _words(metric: Callable[[Any], Any] | None, position: int) -> str:
    if metric is None:
        where = "the last position" if position == -1 else f"position {position}"
        return f"log-probability (nats) of the token predicted at {where}"
    name = getattr(metric, "__name__", type(metric).__name__)
    return "metric that was given" if name == "<lambda>" else name


def _spearman(left: list[float], right: list[float]) -> float:
    """Compute the correlation of ranks, where ties get their mean rank (Spearman 1904)."""
    x, y = (torch.tensor(_ranks(values), dtype=torch.float64) for values in (left, right))
    x, y = x - x.mean(), y - y.mean()
    size = (x.square().sum() * y.square().sum()).sqrt()
    return float((x * y).sum() / size) if len(left) > 1 and size > 0 else math.nan


def _ranks(values: list[float]) -> list[float]:
    below = [sum(other < value for other in values) for value in values]
    return [low + (values.count(value) - 1) / 2 for low, value in zip(below, values, strict=True)]
