"""The runs of `effects`: one without cuts, one that weighs the edges, and the runs with cuts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from clearhead._capture import Call, call_with, read_call
from clearhead._core import value_error
from clearhead.intervention import edits
from clearhead.intervention.candidates import Candidate
from clearhead.intervention.cuts import Cut, Offsets
from clearhead.intervention.cutter import OtherBatch, cutting
from clearhead.intervention.selection import HeadSelection
from clearhead.readings import TopK

__all__ = ["Baseline", "EdgeWeights", "after_cuts", "likelihood", "number"]

# Positions in one forward of several cuts, and numbers in its output.
_POSITIONS, _NUMBERS = 1 << 12, 1 << 26


class Baseline:
    """A run without cuts: its output, and the layers and heads that it has."""

    def __init__(self, model: Any, inputs: Any) -> None:
        with cutting(model, []) as self.cutter:
            self.output = call_with(model, inputs)
        self.cutter.reached("effects", Cut(HeadSelection(None, None, None)))

    def cuts_per_forward(self, inputs: Any) -> int:
        """How many cuts fit into one forward of moderate size."""
        leaves = [x for x in _pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
        positions = max((math.prod(x.shape[:2]) for x in leaves), default=1)
        made = [x for x in _pytree.tree_leaves(self.output) if isinstance(x, Tensor)]
        numbers = sum(x.numel() for x in made)
        return min(_POSITIONS // max(positions, 1), _NUMBERS // max(numbers, 1)) - 1


class EdgeWeights:
    """Sums, in a run without cuts, the weight that lies on what will be cut."""

    def __init__(self, found: list[Candidate]) -> None:
        self.candidates = found
        self.sums = [0.0] * len(found)
        self.counts = [0] * len(found)
        self.sources = 0

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Sum the weights of the calls inside the block."""
        with cutting(model, []) as cutter:
            cutter.on_call = self._add
            yield

    def check(self, every: bool) -> None:
        """Raise where no call has an edge of some candidate: of any one, or with `every` of all."""
        for thing in self.candidates:
            if isinstance(thing.name, int) and thing.name >= self.sources:
                rule = f"the calls have sources 0..{self.sources - 1}"
                raise value_error("sources", rule, got=thing.name)
        pairs = zip(self.candidates, self.counts, strict=True)
        none = [
            t for t, count in pairs if not (count or t.edges is None or isinstance(t.name, int))
        ]
        if none and (every or len(none) == len(self.candidates)):
            raise value_error(
                "edges",
                "must be allowed by the model's own mask, in the chosen layers and heads",
                got=f"{none[0].name if every else none[0].edges!r}, which is blocked there",
                hint="watch(model) has the mask of each call: record.mask",
            )

    def _add(self, call: Call, offsets: Offsets) -> None:
        self.sources = max(self.sources, offsets.source + call.sizes.source)
        for at, thing in enumerate(self.candidates):
            of, total = enumerate(call.heads), call.all_heads
            heads = [h for h, name in of if thing.where.holds(call.layer, name, total)]
            if not heads:
                continue
            part = edits.narrowed(call, slice(None), heads)
            if thing.edges is None:
                (top,) = read_call(part, (TopK(1),), None)
                weight, rows = top.weights[..., 0], torch.ones_like(top.weights[..., 0])
            else:
                edges = offsets.edges(thing.edges, part)
                weight = edits.weight_on(part, edges)
                rows = edits.edit(part, edges, None).rows[..., 0].expand_as(weight)
            self.sums[at] += float(weight.sum())
            self.counts[at] += int(rows.sum())

    def values(self) -> list[float]:
        """Give the mean weight of each candidate."""
        return [s / max(count, 1) for s, count in zip(self.sums, self.counts, strict=True)]


def after_cuts(
    model: Any,
    inputs: Any,
    things: list[Candidate],
    measure: Callable[[Any], Any],
    step: int,
    before: float,
) -> list[float]:
    """Measure after each cut: several in one forward, or one by one where samples interact."""
    found: list[float] = []
    for start in range(0, len(things), step):
        some = things[start : start + step]
        together = _together(model, inputs, some, measure, before) if step > 1 else None
        if together is None:
            step, together = 1, [_alone(model, inputs, thing, measure) for thing in some]
        found += together
    return found


def _alone(model: Any, inputs: Any, thing: Candidate, measure: Callable[[Any], Any]) -> float:
    with cutting(model, [thing.cut(slice(None))]):
        return number(measure(call_with(model, inputs)))


def _together(
    model: Any, inputs: Any, things: list[Candidate], measure: Callable[[Any], Any], before: float
) -> list[float] | None:
    """Repeat the batch for each cut, and once without to check that samples do not interact."""
    size, copies = _samples(inputs), len(things) + 1
    slices = [slice(at * size, (at + 1) * size) for at in range(copies)]
    cuts = [thing.cut(at) for thing, at in zip(things, slices[1:], strict=True)]
    try:
        with cutting(model, cuts, slices) as cutter:
            cutter.batch = size * copies
            output = call_with(model, _repeated(inputs, size, copies))
    except OtherBatch:
        return None
    numbers = [number(measure(_sliced(output, at, size * copies))) for at in slices]
    same = math.isclose(numbers[0], before, rel_tol=1e-3, abs_tol=1e-4) or before != before
    return numbers[1:] if same else None


def _samples(inputs: Any) -> int:
    """Give the number of samples: the size of the first axis of the first tensor."""
    sizes = [x.shape[0] for x in _pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.ndim]
    return sizes[0] if sizes else 1


def _repeated(inputs: Any, size: int, copies: int) -> Any:
    def several(x: Any) -> Any:
        whole = isinstance(x, Tensor) and x.ndim and x.shape[0] == size
        return torch.cat([x] * copies) if whole else x

    return _pytree.tree_map(several, inputs)


def _sliced(output: Any, at: slice, size: int) -> Any:
    """Select the part of an output that belongs to some samples."""

    def part(x: Any) -> Any:
        return x[at] if isinstance(x, Tensor) and x.ndim and x.shape[0] == size else x

    return _pytree.tree_map(part, output)


def likelihood(output: Any, position: int) -> Callable[[Any], Tensor]:
    """Make the metric: the log-probability of the token predicted without cuts at a position."""
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
            "metric", "is needed where the output is not logits (..., position, token)", got=got,
            hint="metric=lambda output: ... gives one number",
        )  # fmt: skip
    return found


def number(value: Any) -> float:
    """Read the result of a metric."""
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
