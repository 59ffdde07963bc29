"""effects(): how much weight ran over an edge, beside what changes when it is cut."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils import _pytree

from clearhead import masks
from clearhead._capture import Call, call_with, recompute
from clearhead._core import is_number, type_error, value_error
from clearhead.intervention import edits
from clearhead.intervention.choosing import Chosen, chosen
from clearhead.intervention.cutter import Cut, Edges, OtherBatch, Place, cutting
from clearhead.intervention.cutting import Heads, Model, _edges, _is_pair, listed
from clearhead.intervention.outputs import Ablated
from clearhead.masks import Mask
from clearhead.readings import TopK

__all__ = ["Effect", "Effects", "effects"]

# Positions in one forward of several cuts, and numbers in its output.
_POSITIONS, _NUMBERS = 1 << 12, 1 << 26
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
        clean = _Clean(model, inputs)
        where = chosen(layers, heads)
        where.check(clean.cutter.totals, clean.cutter.modules)
        by_head = sources is None and not _several(edges)
        things = _things(edges, sources, where, clean.cutter.totals)
        measure = _confident(clean.output, position) if metric is None else metric
        before = _number(measure(clean.output))
        weights = _Weights(things)
        with weights.watching(model):
            call_with(model, inputs)
        weights.check(every=not by_head)
        step = _step(clean, inputs) if batch is None else batch
        after = _all(model, inputs, things, measure, max(step, 1), before)
    named = zip(things, weights.values(), after, strict=True)
    rows = [Effect(thing.name, weight, number - before) for thing, weight, number in named]
    small = _NATS if metric is None else _SHARE * abs(before)
    return Effects(rows, before, small, by_head)


@dataclass(frozen=True)
class _Thing:
    """Something to cut: edges, or whole heads where there are none."""

    name: Any
    edges: Mask | None
    where: Chosen

    def cut(self, samples: slice) -> Cut:
        if self.edges is None:
            return Ablated("zero", None, 0, self.where, samples)
        return Edges(self.edges, self.where, samples)


def _things(edges: Any, sources: Any, where: Chosen, totals: dict[int, int]) -> list[_Thing]:
    if edges is not None and sources is not None:
        raise value_error("edges", "and sources are two questions", hint="call effects twice")
    if sources is not None:
        listed = [_position("sources", source) for source in sources]
        return _some("sources", [_Thing(source, _column(source), where) for source in listed])
    if edges is not None and _several(edges):
        named = [(_name(edge), _cut_of(edge)) for edge in edges]
        return _some("edges", [_Thing(name, mask, where) for name, mask in named])
    mask = None if edges is None else _cut_of(edges)
    pairs = [
        (layer, head)
        for layer, total in totals.items()
        for head in range(total)
        if where.holds(layer, head, total)
    ]
    return [_Thing(pair, mask, Chosen(None, None, (pair,))) for pair in pairs]


def _some(argument: str, things: list[_Thing]) -> list[_Thing]:
    if not things:
        raise value_error(argument, "needs at least one thing to cut", got="none")
    return things


def _several(edges: Any) -> bool:
    return isinstance(edges, list) or (isinstance(edges, tuple) and not _is_pair(edges))


def _name(edge: Any) -> Any:
    return tuple(edge) if isinstance(edge, (tuple, list)) else edge


def _cut_of(edge: Any) -> Mask:
    if isinstance(edge, (Mask, Tensor, str)) or callable(edge):
        return _edges(edge)
    if not isinstance(edge, (tuple, list)) or len(edge) != 2:
        raise type_error("edges", "takes (query, source) pairs or masks", got=repr(edge))
    for number in edge:
        _position("edges", number)
    return _edges([edge])


def _position(argument: str, number: Any) -> int:
    if not is_number(number):
        raise type_error(argument, "takes positions", got=repr(number))
    if number < 0:
        raise value_error(argument, "takes positions counted from 0", got=number)
    return int(number)


def _column(source: int) -> Mask:
    return masks.where(lambda b, h, i, j: (j == source) & (i != source))


class _Clean:
    """A run without any cut: its output, and the layers and heads that it has."""

    def __init__(self, model: Any, inputs: Any) -> None:
        with cutting(model, []) as self.cutter:
            self.output = call_with(model, inputs)
        self.cutter.reached("effects", Cut(Chosen(None, None, None)))


class _Weights:
    """Sums up, in a run without cuts, the weight that lies on what will be cut."""

    def __init__(self, things: list[_Thing]) -> None:
        self.things = things
        self.sums = [0.0] * len(things)
        self.counts = [0] * len(things)
        self.sources = 0

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        with cutting(model, []) as cutter:
            cutter.on_call = self._add
            yield

    def check(self, every: bool) -> None:
        """Raise where `every` thing needs an edge in some call, or any of them, and has none."""
        for thing in self.things:
            if isinstance(thing.name, int) and thing.name >= self.sources:
                rule = f"the calls have sources 0..{self.sources - 1}"
                raise value_error("sources", rule, got=thing.name)
        pairs = zip(self.things, self.counts, strict=True)
        none = [
            t for t, count in pairs if not (count or t.edges is None or isinstance(t.name, int))
        ]
        if none and (every or len(none) == len(self.things)):
            raise value_error(
                "edges",
                "are some that the model's own mask allows, in the chosen layers and heads",
                got=f"{none[0].name if every else none[0].edges!r}, which is blocked there",
                hint="watch(model) has the mask of each call: record.mask",
            )

    def _add(self, call: Call, place: Place) -> None:
        total = call.sizes[1]
        self.sources = max(self.sources, place.source + call.sizes[3])
        for at, thing in enumerate(self.things):
            heads = [h for h in range(total) if thing.where.holds(call.layer, h, total)]
            if not heads:
                continue
            part = edits.narrow(call, slice(None), heads)
            if thing.edges is None:
                (top,) = recompute.read(part, (TopK(1),), None)
                weight, rows = top.weights[..., 0], torch.ones_like(top.weights[..., 0])
            else:
                edges = place.edges(thing.edges, part)
                weight = edits.weight_on(part, edges)
                rows = edits.touched(part, edges)[..., 0].expand_as(weight)
            self.sums[at] += float(weight.sum())
            self.counts[at] += int(rows.sum())

    def values(self) -> list[float]:
        return [s / max(count, 1) for s, count in zip(self.sums, self.counts, strict=True)]


def _all(
    model: Any,
    inputs: Any,
    things: list[_Thing],
    measure: Callable[[Any], Any],
    step: int,
    before: float,
) -> list[float]:
    """Measure after each cut: several in one forward, or where the model cannot, one by one."""
    found: list[float] = []
    for start in range(0, len(things), step):
        some = things[start : start + step]
        together = _together(model, inputs, some, measure, before) if step > 1 else None
        if together is None:
            step, together = 1, [_alone(model, inputs, thing, measure) for thing in some]
        found += together
    return found


def _alone(model: Any, inputs: Any, thing: _Thing, measure: Callable[[Any], Any]) -> float:
    with cutting(model, [thing.cut(slice(None))]):
        return _number(measure(call_with(model, inputs)))


def _together(
    model: Any, inputs: Any, things: list[_Thing], measure: Callable[[Any], Any], before: float
) -> list[float] | None:
    """Run the batch once more for each cut, and once uncut to see that samples stay apart."""
    size, copies = _samples(inputs), len(things) + 1
    slices = [slice(at * size, (at + 1) * size) for at in range(copies)]
    cuts = [thing.cut(at) for thing, at in zip(things, slices[1:], strict=True)]
    try:
        with cutting(model, cuts, slices) as cutter:
            cutter.batch = size * copies
            output = call_with(model, _repeated(inputs, size, copies))
    except OtherBatch:
        return None
    numbers = [_number(measure(_sliced(output, at, size * copies))) for at in slices]
    same = math.isclose(numbers[0], before, rel_tol=1e-3, abs_tol=1e-4) or before != before
    return numbers[1:] if same else None


def _samples(inputs: Any) -> int:
    """How many samples the inputs hold: the size of the first axis of the first tensor."""
    sizes = [x.shape[0] for x in _pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.ndim]
    return sizes[0] if sizes else 1


def _repeated(inputs: Any, size: int, copies: int) -> Any:
    def several(x: Any) -> Any:
        whole = isinstance(x, Tensor) and x.ndim and x.shape[0] == size
        return torch.cat([x] * copies) if whole else x

    return _pytree.tree_map(several, inputs)


def _sliced(output: Any, at: slice, size: int) -> Any:
    """Give the part of an output that belongs to some samples."""

    def part(x: Any) -> Any:
        return x[at] if isinstance(x, Tensor) and x.ndim and x.shape[0] == size else x

    return _pytree.tree_map(part, output)


def _step(clean: _Clean, inputs: Any) -> int:
    """How many cuts fit into one forward of moderate size."""
    leaves = [x for x in _pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    positions = max((math.prod(x.shape[:2]) for x in leaves), default=1)
    numbers = sum(x.numel() for x in _pytree.tree_leaves(clean.output) if isinstance(x, Tensor))
    return min(_POSITIONS // max(positions, 1), _NUMBERS // max(numbers, 1)) - 1


def _confident(output: Any, position: int) -> Callable[[Any], Tensor]:
    """Measure the log-probability of what the model predicts at a position before any cut."""
    logits = _logits(output)
    size = logits.shape[-2]
    if not -size <= position < size:
        raise value_error("position", f"is within the {size} positions of the output", got=position)
    best = logits[..., position, :].argmax(-1, keepdim=True)

    def measure(changed: Any) -> Tensor:
        row = _logits(changed)[..., position, :]
        row = row if row.dtype == torch.float64 else row.float()
        return row.log_softmax(-1).gather(-1, best).mean()

    return measure


def _logits(output: Any) -> Tensor:
    found = getattr(output, "logits", output)
    found = found[0] if isinstance(found, (tuple, list)) and found else found
    if not isinstance(found, Tensor) or found.ndim < 2 or not found.is_floating_point():
        got = (
            f"a tensor of shape {tuple(found.shape)}"
            if isinstance(found, Tensor)
            else type(found).__name__
        )
        raise value_error(
            "metric", "is needed where the output is no logits (..., position, token)", got=got,
            hint="metric=lambda output: ... gives one number",
        )  # fmt: skip
    return found


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (int, float)):
        return float(value)
    got = (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )
    raise value_error("metric", "gives one number", got=got)


def _spearman(left: list[float], right: list[float]) -> float:
    """Correlate the ranks, ties sharing their mean rank (Spearman 1904)."""
    x, y = (torch.tensor(_ranks(values), dtype=torch.float64) for values in (left, right))
    x, y = x - x.mean(), y - y.mean()
    size = (x.square().sum() * y.square().sum()).sqrt()
    return float((x * y).sum() / size) if len(left) > 1 and size > 0 else math.nan


def _ranks(values: list[float]) -> list[float]:
    below = [sum(other < value for other in values) for value in values]
    return [low + (values.count(value) - 1) / 2 for low, value in zip(below, values, strict=True)]
