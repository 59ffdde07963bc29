"""The axes of one tensor as factors of the axes of the activation that it was made from.

A projection makes `(batch, position, width)`. Views divide the width into heads, reorder axes,
merge heads into the batch, and take slices; each axis is then a product of factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["REPEATED", "Axis", "AxisLayout", "Factor", "fresh"]

# The name of the last axis of a projection; those of its pieces begin with it, in their order.
WIDTH = "w"
# The name of an axis that was expanded.
REPEATED = "repeated"


@dataclass(frozen=True)
class Factor:
    """An axis of an activation or a piece of one, or a slice of that."""

    name: str
    size: int
    start: int = 0
    whole: int = 0  # how many there are where this is a slice; else the size
    parts: tuple[Factor, ...] = ()  # of a slice that runs over several factors
    mixed: bool = False  # whether it has another order, or gaps
    own: int = 0  # how many positions it begins with, where others were appended

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", self.whole or self.size)

    @property
    def sliced(self) -> bool:
        """Whether some of it is missing."""
        return self.size != self.whole

    @property
    def of_width(self) -> bool:
        """Whether it is a piece of the width: heads, where it is not the last axis."""
        return self.name.startswith(WIDTH)

    def cut(self, start: int, size: int) -> Factor:
        """Take a slice; of a piece of the width it is one of the heads that were left."""
        if self.of_width and self.sliced:
            return replace(self, start=start, size=size, whole=self.size)
        return replace(self, start=self.start + start, size=size)

    def complete(self) -> Factor:
        """Take it for all there is."""
        return replace(self, start=0, whole=self.size)

    def complete_with(self, count: int) -> tuple[Factor, Factor]:
        """Give the factors of `count` equal slices, of which this is the first, and of one."""
        return Factor(self.name + "0", count), Factor(self.name + "1", self.size)

    def divided(self, outer: int, inner: int) -> tuple[Factor, Factor] | None:
        """Divide an axis into two; None where a slice does not divide."""
        if self.parts or self.start % inner or self.whole % inner:
            return None
        start, whole = self.start // inner, self.whole // inner
        large = Factor(self.name + "0", outer, start, whole, mixed=self.mixed)
        return large, Factor(self.name + "1", inner, mixed=self.mixed)


Axis = tuple[Factor, ...]


@dataclass(frozen=True)
class AxisLayout:
    """The factors of each axis, and those of which one index was selected."""

    axes: tuple[Axis, ...]
    selected: tuple[Factor, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(math.prod(factor.size for factor in axis) for axis in self.axes)

    @property
    def repeated(self) -> bool:
        """Whether it is the same for all entries of an axis."""
        return any(factor.name == REPEATED for axis in self.axes for factor in axis)

    def reordered(self, order: Sequence[int]) -> AxisLayout:
        """Give the axes another order."""
        return replace(self, axes=tuple(self.axes[at] for at in order))

    def with_axis(self, at: int, axis: Axis) -> AxisLayout:
        """Replace an axis."""
        axes = list(self.axes)
        axes[at] = axis
        return replace(self, axes=tuple(axes))

    def sliced(self, at: int, start: int, size: int) -> AxisLayout:
        """Take a slice of an axis."""
        axis = self.axes[at]
        length = math.prod(factor.size for factor in axis)
        if size == length:
            return self
        if len(axis) > 1:
            name = "*".join(factor.name for factor in axis)
            return self.with_axis(at, (Factor(name, size, start, length, axis),))
        return self.with_axis(at, tuple(factor.cut(start, size) for factor in axis))

    def select(self, at: int, index: int) -> AxisLayout:
        """Take one index of an axis, which is gone then."""
        taken = self.sliced(at, index, 1)
        axes = taken.axes[:at] + taken.axes[at + 1 :]
        return AxisLayout(axes, taken.selected + taken.axes[at])

    def mixed(self, at: int, size: int) -> AxisLayout | None:
        """Take some of an axis in any order; None for features, and for several axes in one."""
        axis = self.axes[at]
        features = at % len(self.axes) == len(self.axes) - 1
        if len(axis) != 1 or axis[0].parts or (axis[0].of_width and features):
            return None
        return self.with_axis(at, (replace(axis[0], size=size, start=0, mixed=True),))

    def reshaped(self, shape: Sequence[int]) -> AxisLayout | None:
        """Divide and merge axes; None where factors do not fall on the new axes."""
        if self.shape == tuple(shape):
            return self
        pending = [factor for axis in self.axes for factor in axis]
        axes = []
        for size in shape:
            axis = _taken(pending, size)
            if axis is None:
                return None
            axes.append(axis)
        return AxisLayout(tuple(axes), self.selected + tuple(pending))


def _taken(pending: list[Factor], size: int) -> Axis | None:
    """Take the factors of one axis from the front of those that are left."""
    axis, left = [], size
    while pending and (left > 1 or (size == pending[0].size == 1 and not axis)):
        factor = pending.pop(0)
        if left % factor.size == 0:
            axis.append(factor)
            left //= factor.size
            continue
        pieces = factor.divided(left, factor.size // left) if factor.size % left == 0 else None
        if pieces is None:
            return None
        axis.append(pieces[0])
        pending.insert(0, pieces[1])
        left = 1
    return tuple(axis) if left == 1 else None


def fresh(shape: Sequence[int]) -> AxisLayout | None:
    """Give the layout of an activation; None for one that is empty."""
    if not shape or 0 in shape:
        return None
    names = [str(at) for at in range(len(shape) - 1)] + [WIDTH]
    pairs = zip(names, shape, strict=True)
    return AxisLayout(tuple((Factor(name, size),) if size > 1 else () for name, size in pairs))
