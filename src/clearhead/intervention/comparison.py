"""effects(): how much weight ran over an edge, beside what changes when it is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch

from clearhead._capture import call_with
from clearhead.intervention.candidates import candidates, several
from clearhead.intervention.selection import Heads, Model, listed, select_heads
from clearhead.intervention.trials import Baseline, EdgeWeights, after_cuts, likelihood, number

__all__ = ["Effect", "Effects", "effects"]

# Of fewer cuts the ranks say nothing: of two they always agree or always disagree.
FEW = 5
# Effects up to this are none: of a log-probability in nats, and as a share of another metric.
_NATS, _SHARE = 0.01, 1e-3


@dataclass(frozen=True)
class Effect:
    """One cut: how much weight lay there, and by how much the metric changed without it."""

    cut: Any  # (query, source), a source, a (layer, head) or a Mask
    weight: float
    effect: float


@dataclass(frozen=True)
class Effects(Sequence[Effect]):
    """The cuts in the order asked for, and the metric `before` any."""

    rows: list[Effect] = field(repr=False)
    before: float
    small: float = 0.0  # the largest effect that counts as none
    heads: bool = False  # whether the cuts are (layer, head)

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
        """Spearman's correlation of weight and size of the effect; NaN where one is constant."""
        return _spearman([row.weight for row in self], [abs(row.effect) for row in self])

    @property
    def words(self) -> str:
        """Say how good a guide to the effect the weight is here, where so few numbers can tell."""
        found = self.rank_correlation
        if len(self) < FEW:
            return (
                f"compare weight and change by eye: of fewer than {FEW} cuts the ranks tell nothing"
            )
        if max(abs(row.effect) for row in self) <= self.small:
            return "here no cut makes a difference, whatever its weight"
        if math.isnan(found):
            return "here there is too little to compare weight and effect"
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
    """Cut one thing after the other, and set the weight it had beside the effect of the cut.

    >>> import torch, clearhead as ch
    >>> model = ch.models.load()
    >>> tokens = model.vocabulary.encode("hell")[None]
    >>> table = ch.effects(model, tokens, edges=[(3, 0), (3, 1), (3, 2)])
    >>> table[0].cut, table[0].weight > 0
    ((3, 0), True)

    What is cut, one row of the table for each:

    - `edges`: a list of (query, source) pairs or of masks, each cut in all chosen layers and heads;
    - `sources`: positions, each cut from every query but its own;
    - neither: every one of the chosen heads, whole, or only its `edges` where that is one mask.

    The weight of edges is summed over the sources of each query that has such an edge, and averaged
    over those queries, the heads and the samples. A whole head has all of its weight on all of its
    edges; its weight here is its confidence, the mean of the largest weight (Voita et al. 2019).

    - `metric`: makes a number of the model's output; by default the log-probability (in nats) of
      what the model predicts at `position` as it is. The effect is the metric after less before.
      `words` of the table, its last line, says how good a guide to the effect the weight is.
    - `layers`, `heads`: as in `knockout`.
    - `batch`: how many cuts share a forward; as many as fit into moderate memory unless given.

    An edge that no call has, such as one of the future in a causal model, is a ValueError.

    Several cuts share a forward where the model runs samples apart, along the first axis of its
    inputs; where it does not, each has its own.
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
    return Effects(rows, before, small, by_head)


def _spearman(left: list[float], right: list[float]) -> float:
    """Correlate the ranks, ties sharing their mean rank (Spearman 1904)."""
    x, y = (torch.tensor(_ranks(values), dtype=torch.float64) for values in (left, right))
    x, y = x - x.mean(), y - y.mean()
    size = (x.square().sum() * y.square().sum()).sqrt()
    return float((x * y).sum() / size) if len(left) > 1 and size > 0 else math.nan


def _ranks(values: list[float]) -> list[float]:
    below = [sum(other < value for other in values) for value in values]
    return [low + (values.count(value) - 1) / 2 for low, value in zip(below, values, strict=True)]
