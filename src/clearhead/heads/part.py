"""What attention calls add to the statistics of their heads, and the statistics of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead._core import value_error
from clearhead.heads.batch import Batch
from clearhead.heads.look import CORNER, Look
from clearhead.heads.moments import Moments
from clearhead.heads.statistics import STATISTICS, Values, moments_of

__all__ = ["Calls", "Layer", "Outline", "Part", "Tally", "joined"]

# Numbers in the maps of calls that are looked at together.
TOGETHER = 1 << 19


class Outline(NamedTuple):
    """Which layer the numbers belong to."""

    module: str
    heads: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of a layer's statistics, overlap and corner."""
        heads = self.heads
        return [(len(STATISTICS), heads), (heads, heads), (heads, CORNER, CORNER)]


@dataclass(frozen=True, eq=False)
class Layer:
    """The statistics of one layer, over all sequences so far."""

    module: str
    statistics: Moments  # (statistic, head)
    overlap: Moments  # (head, head)
    corner: Moments  # (head, CORNER, CORNER)

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return self.overlap.count.shape[0]

    def variability(self) -> Tensor:
        """The share of the weights' squares that differs between sequences, (head,)."""
        corner = self.corner
        own = torch.where(corner.count > 1, corner.spread, 0).sum((-2, -1))
        squares = torch.where(corner.count > 1, corner.count * corner.mean**2, 0).sum((-2, -1))
        return own / (own + squares)


@dataclass(frozen=True, eq=False)
class Part:
    """What a batch adds to one layer, sequence by sequence: a batch axis before the head axis."""

    outline: Outline
    statistics: Moments  # (statistic, batch, head)
    overlap: Moments  # (batch, head, head)
    corner: Moments  # (batch, head, CORNER, CORNER)

    @staticmethod
    def of(modules: Sequence[str], values: Values) -> list[Part]:
        """Take all statistics of some calls, whose samples stand one call after another."""
        overlap = values["overlap"]
        some = values.rows.any(-1)[..., None]
        pairs = Moments.of(overlap.unsqueeze(-1), (some & some.mT).unsqueeze(-1))
        found = moments_of(values), pairs, _corner(values)
        size = len(overlap) // len(modules)
        parts = []
        for number, module in enumerate(modules):
            own = slice(number * size, (number + 1) * size)
            statistics, rest = found[0][:, own], (moments[own] for moments in found[1:])
            parts.append(Part(Outline(module, overlap.shape[-1]), statistics, *rest))
        return parts

    def numbers(self) -> list[Moments]:
        """Statistics, overlap and corner, each (batch, number)."""
        statistics = self.statistics.map(lambda x: x.movedim(1, 0))
        return [m.map(lambda x: x.flatten(1)) for m in (statistics, self.overlap, self.corner)]


class Calls:
    """The calls of one run. Statistics of small ones are taken several layers at a time.

    So many operations on few numbers each would take as long as the model itself.
    """

    def __init__(self, look: Look, names: Sequence[str]) -> None:
        self.names, self.parts = names, list[Part]()
        self._looks = {1: look}
        self._waiting: list[tuple[str, Sequence[Any]]] = []

    def add(self, module: str, value: Sequence[Any]) -> None:
        """Take in what was read of one call."""
        whole = value[-1]
        one = isinstance(whole, Tensor)
        # What is no tensor never waits, so that those that do have one shape.
        if self._waiting and not (one and whole.shape == self._waiting[0][1][-1].shape):
            self.flush()
        self._waiting.append((module, value))
        if not one or len(self._waiting) * whole.numel() >= TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Take the statistics of the calls that wait."""
        if not self._waiting:
            return
        modules, values = zip(*self._waiting, strict=True)
        self._waiting = []
        beside = [_beside(each) for each in zip(*values, strict=True)]
        look = self._look(len(modules))
        found = Values(look, dict(zip(self.names, beside, strict=True)))
        _unread(modules, found)
        self.parts += Part.of(modules, found)

    def _look(self, count: int) -> Look:
        if count not in self._looks:
            batch = self._looks[1].batch
            again = Batch(batch.tokens.repeat(count, 1), batch.real.repeat(count, 1))
            self._looks[count] = Look(again)
        return self._looks[count]


def _beside(values: Sequence[Any]) -> Any:
    """Put what was read of several calls one after another, along the batch axis."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    return type(first)(*map(_beside, zip(*values, strict=True)))


def _unread(modules: Sequence[str], values: Values) -> None:
    """Refuse a model in which real tokens attend to padding: its numbers would depend on it."""
    if not values.batch.padded:
        return
    read = values["padding"].view(len(modules), -1).amax(-1)
    for module, weight in zip(modules, read.tolist(), strict=True):
        if weight > 0:
            raise value_error(
                "real",
                f"the model attends to padding in {module or 'its attention'}",
                got=f"a weight of {weight:.2g}",
                hint="give sequences of equal length, or run=, which passes the model's own mask",
            )


def joined(parts: Sequence[Part]) -> Moments:
    """All numbers of all layers, (batch, number): statistics first, then overlaps, then corners."""
    kinds = zip(*(part.numbers() for part in parts), strict=True)
    return Moments.cat([moments for kind in kinds for moments in kind])


class Tally:
    """The numbers of all layers in one row, so that adding a sequence takes few operations."""

    def __init__(self, outlines: Sequence[Outline], moments: Moments | None = None) -> None:
        self.outlines = list(outlines)
        shapes = [outline.shapes for outline in self.outlines]
        # Kind by kind, as `joined` puts them.
        self._shapes = [kind for kinds in zip(*shapes, strict=True) for kind in kinds]
        size = sum(map(prod, self._shapes))
        self.moments = Moments.none((size,)) if moments is None else moments

    @property
    def of_statistics(self) -> int:
        """How many of the numbers are statistics: the first ones."""
        return sum(prod(outline.shapes[0]) for outline in self.outlines)

    def add(self, moments: Moments) -> None:
        """Add the row of one sequence."""
        self.moments = self.moments.merge(moments)

    @property
    def layers(self) -> list[Layer]:
        """The numbers layer by layer."""
        ends = torch.tensor([prod(shape) for shape in self._shapes]).cumsum(0).tolist()
        pieces = [
            self.moments[end - prod(shape) : end].map(lambda x, shape=shape: x.view(shape))
            for end, shape in zip(ends, self._shapes, strict=True)
        ]
        count = len(self.outlines)
        return [
            Layer(outline.module, *pieces[number::count])
            for number, outline in enumerate(self.outlines)
        ]


def _corner(values: Values) -> Moments:
    """The weights among the first real positions of each sequence, each counted once."""
    batch, corner = values.batch, values["corner"]
    at = batch.start[:, None] + torch.arange(CORNER, device=corner.device)
    inside = at < batch.sizes[1]
    at = at.clamp(max=max(batch.sizes[1] - 1, 0))
    real = batch.real.gather(-1, at) & inside
    rows = torch.stack([r[:, a] for r, a in zip(values.rows, at, strict=True)])
    counted = (rows & real[:, None])[..., None] & real[:, None, None]
    return Moments.of(corner.unsqueeze(-1), counted.unsqueeze(-1))
