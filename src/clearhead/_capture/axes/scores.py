"""The axes of a product of query and key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from clearhead._capture.axes.layout import AxisLayout, Factor

__all__ = ["paired_axes", "paired_letters", "scored", "scores_of"]

# For each axis of the product, which axis of the left and of the right operand it is.
Pairs = Sequence[tuple[int | None, int | None]]


def paired_axes(left: AxisLayout | None, right: AxisLayout | None, count: int) -> Pairs | None:
    """Pair the axes of a matrix product with `count` axes."""
    if left is None or right is None or min(len(left.axes), len(right.axes)) < 2:
        return None
    pairs: list[tuple[int | None, int | None]] = []
    for back in range(count, 2, -1):
        one, two = (x if (x := len(layout.axes) - back) >= 0 else None for layout in (left, right))
        pairs.append((one, two))
    return [*pairs, (len(left.axes) - 2, None), (None, len(right.axes) - 1)]


def scores_of(query: AxisLayout | None, key: AxisLayout | None) -> AxisLayout | None:
    """Give the layout of the scores that a kernel computes from query and key."""
    if query is None or key is None or len(query.axes) != len(key.axes) or len(key.axes) < 2:
        return None
    count = len(key.axes)
    turned = key.reordered([*range(count - 2), count - 1, count - 2])
    pairs = paired_axes(query, turned, count)
    return None if pairs is None else scored(query, turned, pairs)


def paired_letters(equation: str, operands: Sequence[Tensor]) -> Pairs | None:
    """Pair the axes of an einsum of two operands, by its letters."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if not arrow or len(names) != 2:
        return None
    left, right = (_letters(name, x.ndim) for name, x in zip(names, operands, strict=True))
    dots = max((x for x in (*left, *right) if x.isdigit()), default="", key=int)
    spelled = _letters(result, len(result.replace("...", "")) + (int(dots) + 1 if dots else 0))
    pairs = [(_index(left, x), _index(right, x)) for x in spelled]
    return pairs


def _letters(subscripts: str, ndim: int) -> list[str]:
    """Give a name to each axis; those of an ellipsis are numbers, counted from the right."""
    before, dots, after = subscripts.partition("...")
    missing = ndim - len(before) - len(after) if dots else 0
    return [*before, *(str(at) for at in range(missing - 1, -1, -1)), *after]


def _index(names: list[str], name: str) -> int | None:
    return names.index(name) if name in names else None


def scored(left: AxisLayout | None, right: AxisLayout | None, pairs: Pairs) -> AxisLayout | None:
    """Give the layout of a product of query and key; `pairs` has, for each axis, those of both.

    What was cut out of one packed projection, queries here and keys there, is no slice of heads.
    """
    if left is None or right is None:
        return None
    axes = []
    for ours, theirs in pairs:
        mine = () if ours is None else _real(left.axes[ours], right)
        axes.append(mine if mine or theirs is None else _real(right.axes[theirs], left))
    paired = {ours for ours, _ in pairs}
    summed = [f for at, axis in enumerate(left.axes) if at not in paired for f in axis]
    selected = [f for f in _real([*left.selected, *summed], right) if f.sliced]
    return AxisLayout(tuple(axes), tuple(selected))


def _real(factors: Sequence[Factor], other: AxisLayout) -> tuple[Factor, ...]:
    there = list(_all_factors(other))
    return tuple(
        f.complete() if f.of_width and f.sliced and not _overlaps(f, there) else f for f in factors
    )


def _all_factors(layout: AxisLayout) -> Iterator[Factor]:
    for axis in layout.axes:
        yield from axis
    yield from layout.selected


def _overlaps(factor: Factor, others: Sequence[Factor]) -> bool:
    """Whether a slice of the width and those of the other operand are of the same heads."""
    same = [x for x in others if x.name == factor.name]
    name = factor.name
    kin = same or [x for x in others if name.startswith(x.name) or x.name.startswith(name)]
    start, stop = factor.start / factor.whole, (factor.start + factor.size) / factor.whole
    spans = [(x.start / x.whole, (x.start + x.size) / x.whole) for x in kin if x.of_width]
    return not spans or any(low < stop - 1e-9 and start < high - 1e-9 for low, high in spans)
