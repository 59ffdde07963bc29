"""What is added to a record that is shown: another record, effects, segments, an image's grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clearhead._core import is_number, type_error, value_error
from clearhead.views.content.effects import entries_of, fitting
from clearhead.views.content.maps import MapLayer
from clearhead.views.shown import Shown

__all__ = ["beside", "divided", "with_effects", "with_tokens"]


def beside(shown: Shown, other: Shown, names: Sequence[str]) -> Shown:
    """Compare two records, which need a layer with the same heads and positions."""
    if len(names) != 2 or not all(isinstance(name, str) for name in names):
        raise value_error("names", "are two texts", got=repr(names)[:80])
    fit = [_alike(one, two) for one, two in zip(shown.layers, other.layers, strict=False)]
    if not any(fit):
        raise value_error(
            "other",
            "has layers with the heads and positions of seen, in the same order",
            shapes={
                "seen (sample, head, query, source)": shown.layers[0].sizes,
                "other": other.layers[0].sizes,
            },
            hint="give both models texts of as many tokens, and watch the same layers= and heads=",
        )
    notes = [*shown.notes, *(f"{names[1]}: {note}" for note in other.notes)]
    left = max(len(shown.layers), len(other.layers)) - sum(fit)
    if left:
        notes.append(f"{left} layers have no counterpart, and are shown without a difference")
    if [axis.labels for axis in shown.axes] != [axis.labels for axis in other.axes]:
        notes.append(f"the tokens differ: a difference is shown at those of {names[0]}")
    unique = tuple(dict.fromkeys(notes))
    return replace(shown, other=other, names=(names[0], names[1]), notes=unique)


def with_effects(shown: Shown, effects: Any) -> Shown:
    """Show what cuts changed beside the weights."""
    own = next((x for x in shown.layers if x.kind == "self"), shown.layers[0])
    offset = own.sizes.source - own.sizes.query if own.kind == "self" else 0
    found = fitting(entries_of(effects), own.sizes.query, own.sizes.source, offset)
    return replace(shown, effects=tuple(found))


def divided(shown: Shown, segments: Any, grid: Any) -> Shown:
    """Name stretches of the positions, or lay the last ones out as the patches of an image."""
    axis, length = shown.axes[0], shown.layers[0].sizes.source
    if segments is not None:
        axis = replace(axis, segments=_segments(segments, length))
    if grid is not None:
        axis = replace(axis, grid=_grid(grid, length))
    return replace(shown, axes=(axis, *shown.axes[1:]))


def with_tokens(shown: Shown, ids: list[int], raw: list[bytes]) -> Shown:
    """Tell each token's number and bytes."""
    axis = replace(shown.axes[0], ids=[ids], raw=[[part.hex(" ") for part in raw]])
    return replace(shown, axes=(axis, *shown.axes[1:]))


def _alike(one: MapLayer, other: MapLayer) -> bool:
    same = one.sizes[2:] == other.sizes[2:] and one.sizes.batch == other.sizes.batch
    return same and one.heads == other.heads and one.rows == other.rows


def _segments(given: Any, length: int) -> tuple[tuple[int, int, str], ...]:
    rule = "are (start, stop, name), in order and without overlaps, within the positions"
    try:
        found = tuple((int(start), int(stop), str(name)) for start, stop, name in given)
    except (TypeError, ValueError):
        raise type_error("segments", rule, got=repr(given)[:80]) from None
    borders = [at for start, stop, _ in found for at in (start, stop)]
    if not found or borders != sorted(borders) or borders[0] < 0 or borders[-1] > length:
        raise value_error("segments", rule, got=repr(given)[:80], shapes={"positions": (length,)})
    return found


def _grid(given: Any, length: int) -> tuple[int, int]:
    rule = "is (rows, columns) of patches, at least 1 and at most as many as there are positions"
    pair = tuple(given) if isinstance(given, (tuple, list)) else ()
    if (
        len(pair) != 2
        or not all(is_number(n) and n > 0 for n in pair)
        or pair[0] * pair[1] > length
    ):
        raise value_error("grid", rule, got=repr(given)[:80], shapes={"positions": (length,)})
    return int(pair[0]), int(pair[1])
