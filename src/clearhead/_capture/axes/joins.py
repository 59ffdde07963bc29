"""How the axes of tensors that are joined make those of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clearhead._capture.axes.layout import Axis, AxisLayout, Factor

__all__ = ["appended", "joined"]


def joined(
    known: list[AxisLayout | None], at: int, stacked: bool, shape: Sequence[int]
) -> AxisLayout | None:
    """Follow `cat` and `stack`: slices that lie side by side are whole again."""
    layouts = [layout for layout in known if layout is not None]
    if not layouts:
        return None
    whole, first, size = len(layouts) == len(known), layouts[0], shape[at]
    if stacked:
        first = replace(first, axes=(*first.axes[:at], (), *first.axes[at:]))
    if whole and (axis := _side_by_side(layouts, at, stacked, at == len(shape) - 1)):
        first = replace(first, selected=first.selected[:-1]) if axis[1] else first
        return first.with_axis(at, (axis[0], *first.axes[at]) if axis[1] else (axis[0],))
    if whole and at < len(shape) - 1 and (heads := _heads_of(layouts)):
        return first.with_axis(-1, heads[1:]).with_axis(at, (heads[0], *first.axes[at]))
    if size == 1:
        return first.with_axis(at, ())
    if at == len(shape) - 1:
        return first.with_axis(at, (Factor("w", size),))
    lone = not stacked and [x for x in layouts if not x.repeated] == [known[0]]
    return first.with_axis(at, (appended(first.axes[at] if lone else (), size),))


def appended(axis: Axis, size: int) -> Factor:
    """Give the factor of an axis of positions to which others were joined."""
    plain = len(axis) == 1 and not axis[0].sliced and not axis[0].mixed and not axis[0].of_width
    return Factor("joined", size, own=(axis[0].own or axis[0].size) if plain else 0)


def _heads_of(layouts: list[AxisLayout]) -> tuple[Factor, Factor] | None:
    """Give the factors of heads and of their width, where equal slices of the width are joined."""
    slices = [x.axes[-1][0] for x in layouts if len(x.axes[-1]) == 1]
    alike = all(x.axes[:-1] == layouts[0].axes[:-1] for x in layouts)
    if not alike or len(slices) < max(2, len(layouts)):
        return None
    first = slices[0]
    for one in slices:
        if (one.name, one.whole, one.size) != (first.name, first.whole, first.size):
            return None
        if not one.of_width or one.mixed:
            return None
    starts = [one.start for one in slices]
    if sorted(starts) != list(range(0, first.whole, first.size)):
        return None
    heads, width = first.complete_with(len(slices))
    return replace(heads, mixed=starts != sorted(starts)), width


def _side_by_side(
    layouts: list[AxisLayout], at: int, stacked: bool, last: bool
) -> tuple[Factor, bool] | None:
    """Give the factor that slices make together, and whether its indices had been selected.

    In another order they make a mixed one, but not on the last axis, which is that of features.
    """
    first = layouts[0]
    if all(x.selected for x in layouts) and all(x.axes == first.axes for x in layouts):
        slices, selected = [x.selected[-1] for x in layouts], True
    elif not stacked and all(len(x.axes[at]) == 1 for x in layouts):
        slices, selected = [x.axes[at][0] for x in layouts], False
    else:
        return None
    ordered = slices if last else sorted(slices, key=lambda x: x.start)
    whole = ordered[0]
    if whole.mixed:
        return None
    for other in ordered[1:]:
        if (other.name, other.whole) != (whole.name, whole.whole) or other.parts != whole.parts:
            return None
        if other.start != whole.start + whole.size or not other.sliced or other.mixed:
            return None
        whole = replace(whole, size=whole.size + other.size)
    return replace(whole, mixed=ordered != slices), selected
