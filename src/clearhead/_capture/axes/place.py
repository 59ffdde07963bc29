"""Where the axes of an attention map lie: batch and heads, and slices of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from clearhead._capture.axes.held import HeldHeads
from clearhead._capture.axes.layout import Axis, AxisLayout, Factor

__all__ = ["Fold", "Place", "fold_of", "misread", "parted", "place_of"]


@dataclass(frozen=True)
class Fold:
    """How the axes before the last two are a batch and a head axis."""

    batch: int
    heads: int
    sizes: tuple[int, ...] | None = None  # of the factors, where they come in another order
    order: tuple[int, ...] = ()

    def split(self, x: Tensor) -> Tensor:
        """Give a tensor `(lead..., a, b)` the axes `(batch, head, a, b)`."""
        if self.sizes is not None:
            count = len(self.sizes)
            x = x.reshape(*self.sizes, *x.shape[-2:]).permute(*self.order, count, count + 1)
        return x.reshape(self.batch, self.heads, *x.shape[-2:])

    def join(self, x: Tensor, lead: Sequence[int]) -> Tensor:
        """Undo `split`."""
        if self.sizes is not None:
            count = len(self.sizes)
            back = [self.order.index(at) for at in range(count)]
            x = x.reshape(*(self.sizes[at] for at in self.order), *x.shape[-2:])
            x = x.permute(*back, count, count + 1)
        return x.reshape(*lead, *x.shape[-2:])


@dataclass(frozen=True)
class Place:
    """Which part of the whole map of a module one call is: (start, whole) of each axis."""

    query: tuple[int, int] | None = None
    source: tuple[int, int] | None = None
    rows: str = ""  # in words, how its samples and heads are not those of the layer
    mixed: str = ""  # in words, why its positions are not those of the model
    windowed: bool = False  # whether that is so because of windows, of which each has its edges
    shuffled: bool = False  # whether its heads or samples stand in another order
    turned: bool = False  # whether its axes are not batch and heads, in this order
    heads: HeldHeads | None = None  # where other ranks hold the other heads of the layer
    flat: bool = False  # whether heads, if there are several, lie in the batch in an unknown order

    def note(self, query: int, source: int) -> str:
        """Say how a record of so many queries and sources differs from one of the whole layer."""
        if self.rows:
            return f"{self.rows}: the samples and heads of a record are not those of the layer"
        if self.mixed:
            return (
                f"its attention {self.mixed}: the positions of a record are not those of the model"
            )
        if self.query is None:
            return ""
        first, whole = self.query
        if query == whole and self.source == self.query:
            return (
                f"its sources go on after the last query, by {source - query}: the positions of "
                "masks, which take the last query to stand at the last source, are not its own"
            )
        if first - (self.source or (0, 0))[0] == source - query:
            return ""  # the last query stands at the last source, as the masks take it
        return (
            f"it computes its attention in chunks of the queries ({first} to {first + query - 1} "
            f"of {whole}): the positions of each record count from its chunk"
        )


def fold_of(lead: Sequence[Axis]) -> Fold | None:
    """Tell heads from batch by their factors; None where none is known to be a head."""
    factors = [factor for axis in lead for factor in axis]
    heads = [at for at, factor in enumerate(factors) if factor.of_width]
    if not heads or any(factor.parts for factor in factors):
        return None
    heads.sort(key=lambda at: factors[at].name)
    others = [at for at in range(len(factors)) if at not in heads]
    order = (*others, *heads)
    sizes = tuple(factor.size for factor in factors)
    batch, count = (math.prod(sizes[at] for at in some) for some in (others, heads))
    plain = order == tuple(range(len(factors)))
    return Fold(batch, count) if plain else Fold(batch, count, sizes, order)


def parted(axes: Sequence[Axis]) -> tuple[list[Axis], Axis, Axis]:
    """Part axes `(lead..., query, source)`."""
    *lead, query, source = axes
    return lead, query, source


def misread(lead: Sequence[Axis], query: Axis, source: Axis) -> bool:
    """Whether a lead axis runs over positions as the sources do, and the query axis does not."""
    names = {(factor.name, factor.size) for factor in source if not factor.of_width}
    before = {(factor.name, factor.size) for axis in lead for factor in axis}
    return bool(names & before) and not names & {(x.name, x.size) for x in query}


def place_of(layout: AxisLayout, lead: Sequence[Axis], query: Axis, source: Axis) -> Place | None:
    """Give the slices that a call is made of; None where it has all of everything."""
    rows = [f for axis in lead for f in axis if f.sliced]
    names = {factor.name for factor in (*query, *source)}
    rows += [f for f in layout.selected if f.sliced and f.name not in names]
    words = " and ".join(dict.fromkeys(_words(factor) for factor in rows))
    text = words and f"it computes its attention slice by slice ({words})"
    if _goes_on(query, source) and not text:
        return Place((0, source[0].own), (0, source[0].own))
    mixed, shuffled = _mixed(lead, query, source), any(x.mixed for axis in lead for x in axis)
    at = None if mixed else _slice_of(query, layout.selected) or _one_of(query, source, layout)
    if at is None and not (text or mixed or shuffled):
        return None
    sources = _slice_of(source, layout.selected) if at else None
    return Place(at, sources, text, mixed, "windows" in mixed, shuffled)


def _mixed(lead: Sequence[Axis], query: Axis, source: Axis) -> str:
    """Say why the positions of a call are not those of the model; empty where they are."""
    if any(factor.mixed for factor in (*query, *source)):
        return "takes queries or sources in another order, or with gaps"
    # Pieces of an axis have names that begin with its name, a digit. The only axis of a projection,
    # which is the first, is that of samples and positions together.
    axes = {factor.name[0] for axis in lead for factor in axis if factor.name[0].isdigit()}
    windows = axes - {"0"} if len(axes) == 1 else axes
    if any(factor.name[0] in windows for factor in query):
        size = math.prod(factor.size for factor in query)
        return f"runs in windows of {size} positions, which lie in its batch"
    return ""


def _words(factor: Factor) -> str:
    if factor.parts:
        kinds = "heads" if any(part.of_width for part in factor.parts) else ""
        kind = "rows of batch and heads" if kinds else "rows of the batch"
    else:
        kind = "heads" if factor.of_width else "samples"
    return f"{kind} {factor.start} to {factor.start + factor.size - 1} of {factor.whole}"


def _goes_on(query: Axis, source: Axis) -> bool:
    """Whether the sources are those of all queries, and then some that are no positions."""
    if len(query) != 1 or len(source) != 1 or query[0].sliced or query[0].mixed:
        return False
    return source[0].own == query[0].size and not source[0].sliced


def _one_of(query: Axis, source: Axis, layout: AxisLayout) -> tuple[int, int] | None:
    """Give start and whole of a query that was selected from the positions of the sources."""
    if query or len(source) != 1 or source[0].of_width:
        return None
    found = [x for x in layout.selected if x.name == source[0].name and x.sliced and not x.mixed]
    return (found[0].start, found[0].whole) if len(found) == 1 else None


def _slice_of(axis: Axis, selected: Sequence[Factor]) -> tuple[int, int] | None:
    """Give start and whole of an axis of positions that is one slice."""
    if len(axis) == 1 and axis[0].sliced and not axis[0].parts:
        return axis[0].start, axis[0].whole
    for block in selected:
        inner = block.name[:-1] + "1" if len(block.name) > 1 else ""
        if len(axis) == 1 and block.sliced and axis[0].name == inner:
            return block.start * axis[0].size, block.whole * axis[0].size
    return None
