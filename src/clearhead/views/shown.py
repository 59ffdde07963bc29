"""What a page shows: records, or arrays of weights, as a header and chunks of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead._core import Sizes, type_error, value_error
from clearhead.recording import Record, Seen
from clearhead.views.content.chunks import PageContent
from clearhead.views.content.maps import MapLayer, layer_of
from clearhead.views.content.records import RecordContent, check_size
from clearhead.views.content.statistics import look_untrained
from clearhead.views.labels import many
from clearhead.views.page.axes import Axis, CallPlace, axes_of, is_pair

__all__ = ["Shown", "record_from", "shown_of"]

UNTRAINED = (
    "looks untrained: every head attends evenly (a normalized entropy above 0.99); were the "
    "weights loaded?"
)


@dataclass(frozen=True)
class Shown:
    """Attention calls, their tokens, and what is said of them."""

    layers: tuple[MapLayer, ...]
    axes: tuple[Axis, ...] = (Axis("tokens"),)
    notes: tuple[str, ...] = ()
    title: str = "Attention"
    made_by: str = field(default="clearhead")
    effects: tuple[dict[str, Any], ...] = ()
    other: Shown | None = None  # a record to compare
    names: tuple[str, str] = ("this", "other")

    @property
    def token_numbers(self) -> list[list[list[Any]] | None]:
        """What tells equal tokens of each axis: their numbers, or their labels."""
        return [axis.ids or axis.labels for axis in self.axes]

    @property
    def segments(self) -> tuple[tuple[int, int, str], ...]:
        """The named stretches of the first axis."""
        return self.axes[0].segments

    @property
    def extent(self) -> str:
        """How much is shown, in words."""
        return many(len(self.layers), "attention call")

    def content(self, live: bool = False) -> PageContent:
        """The header and the chunks of a page: of a file, or of one that asks for rows."""
        return RecordContent(self, live).content()

    def check(self) -> None:
        """Refuse a file that would be too large, and warn where not all weights can be held."""
        check_size(RecordContent(self, live=False))

    def pages(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the header and all chunks (schema `clearhead.view`, version 1)."""
        return self.content().whole()

    def changed(self, tokens: Any = None, title: str | None = None) -> Shown:
        """The same with other labels, or another title."""
        axes = list(self.axes)
        if tokens is not None:
            places = [CallPlace(x.kind, x.module, x.sizes) for x in self.layers]
            labelled, _ = axes_of(places, tokens)
            axes = [
                replace(one, labels=new.labels) for one, new in zip(axes, labelled, strict=True)
            ]
        return replace(self, axes=tuple(axes), title=title or self.title)


def record_from(weights: Any, tokens: Any = None) -> Shown:
    """Take weights that something else made, to show them: (query, source) up to four axes.

    >>> import numpy as np
    >>> shown = record_from(np.eye(3), ["a", "b", "c"])
    >>> len(shown.layers), tuple(shown.layers[0].sizes)
    (1, (1, 1, 3, 3))

    Axes are read from the right as (layer, head, query, source); numpy, torch and whatever numpy
    can convert. Weights are between 0 and 1; NaN is shown as such. `tokens` label the positions;
    where there are fewer queries than sources they label the sources, and the queries are the last
    ones. A pair (labels of the queries, labels of the sources) is cross attention.
    """
    maps = _as_maps(weights)
    many, heads, query, source = maps.shape
    kind = "cross" if is_pair(tokens) or query > source else "self"
    sizes = Sizes(1, heads, query, source)
    axes, at = axes_of([CallPlace(kind, f"layers.{n}", sizes) for n in range(many)], tokens)
    layers = tuple(
        MapLayer(n, f"layers.{n}", 0, kind, tuple(range(heads)), sizes, weights=maps[n][None],
                 axes=at[n])
        for n in range(many)
    )  # fmt: skip
    notes = ("the mask is not known: blocked cells are shown as 0",)
    return Shown(layers, tuple(axes), notes + (UNTRAINED,) * look_untrained(layers))


def _as_maps(weights: Any) -> Tensor:
    maps = _as_numbers(weights)
    if not 2 <= maps.ndim <= 4 or not maps.numel():
        listed = isinstance(weights, (list, tuple))
        stacked = "torch.stack(weights)[:, 0]" if listed else "weights[:, 0]"
        raise value_error(
            "weights",
            "has the axes (layer, head, query, source), or the last two or three of them, none "
            "of them empty",
            shapes={"weights": tuple(maps.shape)},
            hint=f"weights[None] adds an axis; one sample of a batch is {stacked}",
        )
    least, largest = (float(x) for x in maps.nan_to_num(0, posinf=float("inf")).aminmax())
    # Half precision rounds a weight of 1 up by less than this.
    if least < 0 or largest > 1.01:
        hint = "scores go through softmax first; other numbers are divided by their largest"
        got = f"{least:g} to {largest:g}"
        raise value_error("weights", "are 0 or more, and at most 1", got=got, hint=hint)
    return maps.reshape((1,) * (4 - maps.ndim) + tuple(maps.shape))


def _as_numbers(weights: Any) -> Tensor:
    """A tensor, an array or lists of them as float32 on the CPU."""
    try:
        if isinstance(weights, (list, tuple)) and any(isinstance(x, Tensor) for x in weights):
            weights = torch.stack([x.detach().cpu() for x in weights])
        given = weights if isinstance(weights, Tensor) else np.asarray(weights)
        if isinstance(given, np.ndarray):
            # Other libraries' bfloat16 is of the kind "V".
            known = given.dtype.kind in "biufV"
            given = torch.from_numpy(given.astype(np.float32)) if known else None
        if given is not None and not given.is_complex():
            return given.detach().to("cpu", torch.float32)
        problem = ""
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        problem = f" ({error})"
    rule = f"is an array of numbers{problem}"
    raise type_error("weights", rule, got=type(weights).__name__) from None


def shown_of(
    seen: Seen | Record | Sequence[Record] | Shown, tokens: Any = None, title: str | None = None
) -> Shown:
    """Take records of `watch`, or what `record_from` made, and the labels of their positions."""
    if isinstance(seen, Shown):
        return seen.changed(tokens, title)
    records = [seen] if isinstance(seen, Record) else _records(seen)
    if not records or not all(isinstance(record, Record) for record in records):
        got = type(seen).__name__ if records else "no record"
        hint = "record_from(weights, tokens) takes arrays"
        raise type_error("seen", "is what watch() gave, or a record of it", got=got, hint=hint)
    tokens = _read_tokens(tokens, records)
    axes, at = axes_of([CallPlace(r.kind, r.module, r.sizes) for r in records], tokens)
    layers = tuple(layer_of(record, pair) for record, pair in zip(records, at, strict=True))
    notes = tuple(seen.notes) if isinstance(seen, Seen) else ()
    if look_untrained(layers):
        notes += (UNTRAINED,)
    axes[0] = replace(axes[0], prompt=records[0].prompt)
    return Shown(layers, tuple(axes), notes, title or "Attention of a model")


def _read_tokens(tokens: Any, records: Sequence[Record]) -> Any:
    """Of the labels of a whole generation, those that the model read: not the last new token."""
    positions = records[0].sizes.source
    if records[0].prompt is None or not isinstance(tokens, (list, tuple)):
        return tokens
    if len(tokens) == positions + 1 and all(isinstance(x, str) for x in tokens):
        return tokens[:-1]
    return tokens


def _records(seen: Any) -> list[Any]:
    return list(seen) if isinstance(seen, Sequence) else [seen]
