"""How the axes of a result follow from those of its arguments, for each function of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parameter import Parameter

from clearhead._capture.axes.layout import AxisLayout, Factor, fresh
from clearhead._capture.axes.marks import Marks

__all__ = ["REORDERS", "Layouts"]

# Steps that wait for each other; a longer chain is worked out at once.
DEEPEST = 64


class Inferred:
    """A layout that is worked out when it is asked for, which is seldom: how it follows."""

    __slots__ = ("_args", "_layout", "_rule", "_source", "depth", "shape")

    def __init__(self, rule: Callable[..., Any], source: Any, args: Any, shape: Any) -> None:
        self._rule: Callable[..., Any] | None = rule
        self._source: Any = source
        self._args: Any = args
        self._layout, self.shape = None, shape
        if isinstance(source, list):
            self.depth = 1 + max(step.depth for step in source if step is not None)
        else:
            self.depth = 1 + source.depth
        if self.depth > DEEPEST:
            self.layout  # noqa: B018
            self.depth = 0

    @property
    def layout(self) -> Any:
        """The layout of a tensor, or those of several, or None."""
        if self._rule is not None:
            self._layout = self._made()
            self._rule = self._source = self._args = None
        return self._layout

    def _made(self) -> Any:
        rule, source = self._rule, self._source
        known = [x and x.layout for x in source] if isinstance(source, list) else source.layout
        if known is None or rule is None:
            return None
        try:
            made = rule(known, *self._args, self.shape)
        except (IndexError, TypeError, ValueError, KeyError):
            return None  # arguments that no rule knows: the axes are not known either
        fits = isinstance(made, list) or made is None or made.shape == tuple(self.shape)
        return made if fits else None


class Given(Inferred):
    """A layout that is known, or that of an activation, whose axes are its own."""

    def __init__(self, shape: Any, layout: AxisLayout | None = None) -> None:
        self._rule = None if layout else fresh
        self._layout, self.shape, self.depth = layout, shape, 0

    def _made(self) -> AxisLayout | None:
        return fresh(self.shape)


class Layouts:
    """The layouts of live tensors, which `marks` holds."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def of(self, tensor: object) -> AxisLayout | None:
        """Look a tensor up."""
        step = self._marks.step(tensor)
        return None if step is None else step.layout

    def mark(self, tensor: Any, layout: AxisLayout | None) -> None:
        """Set the layout of a tensor, where it is known."""
        if layout is None or not isinstance(tensor, Tensor):
            return
        if layout.shape == tuple(tensor.shape):
            self._marks.set_step(tensor, Given(tensor.shape, layout))

    def begun(self, source: Any) -> AxisLayout | None:
        """Look up a tensor that is viewed; an unknown activation is taken for a projection."""
        step = self._begun(source)
        return None if step is None else step.layout

    def follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Inferred | list[Inferred] | None:
        """Give the step to what a call returned; several where it returned several tensors."""
        if func in _PROJECTIONS:
            return Given(out.shape)
        if func in _JOINS:
            return self._join(func, args, kwargs, out)
        if func in _RULES:
            source = self._begun(args[0]) if args else None
            return source and _applied(_RULES[func], source, (args[1:], kwargs), out)
        if isinstance(out, Tensor) and func not in REORDERS and out.is_floating_point():
            return self._alike(args, out)
        return None

    def _begun(self, source: Any) -> Inferred | None:
        if not isinstance(source, Tensor) or not source.is_floating_point():
            return None
        step = self._marks.step(source)
        if step is None and not isinstance(source, Parameter):
            return Given(source.shape)
        return step

    def _alike(self, args: tuple[Any, ...], out: Tensor) -> Inferred | None:
        """Give the step to an argument of the shape of the result: a function of each number."""
        for given in args:
            step = self._marks.step(given) if isinstance(given, Tensor) else None
            if step is not None and given.shape == out.shape:
                return step
        return None

    def _join(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Inferred | None:
        given = args[0] if args else kwargs["tensors"]
        at = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        steps: list[Inferred | None] = [self._marks.step(x) for x in given]
        if not isinstance(out, Tensor) or not any(steps):
            return None
        return Inferred(_joined, steps, (at % out.ndim, func is torch.stack), out.shape)


def _applied(
    rule: Callable[..., Any], source: Inferred, given: tuple[Any, Any], out: Any
) -> Inferred | list[Inferred]:
    if isinstance(out, Tensor):
        return Inferred(rule, source, given, out.shape)
    every = Inferred(rule, source, given, [x.shape for x in out])
    return [Inferred(_item, every, (index,), x.shape) for index, x in enumerate(out)]


def _item(layouts: list[AxisLayout], index: int, shape: Any) -> AxisLayout:
    return layouts[index]


def _joined(
    known: list[AxisLayout | None], at: int, stacked: bool, shape: Sequence[int]
) -> AxisLayout | None:
    """Follow `cat` and `stack`: slices that lie side by side are whole again."""
    layouts = [layout for layout in known if layout is not None]
    if not layouts:
        return None
    axis = _side_by_side(layouts, at, stacked) if len(layouts) == len(known) else None
    first, size = layouts[0], shape[at]
    if stacked:
        first = replace(first, axes=(*first.axes[:at], (), *first.axes[at:]))
    if axis is not None:
        first = replace(first, selected=first.selected[:-1]) if axis[1] else first
        axis = (axis[0], *first.axes[at]) if axis[1] else (axis[0],)
    other = (Factor("w" if at == len(shape) - 1 else "joined", size),) if size > 1 else ()
    return first.with_axis(at, axis or other)


def _side_by_side(layouts: list[AxisLayout], at: int, stacked: bool) -> tuple[Factor, bool] | None:
    """Give the factor that slices make together, and whether its indices had been selected."""
    first = layouts[0]
    if all(x.selected for x in layouts) and all(x.axes == first.axes for x in layouts):
        slices, selected = [x.selected[-1] for x in layouts], True
    elif not stacked and all(len(x.axes[at]) == 1 for x in layouts):
        slices, selected = [x.axes[at][0] for x in layouts], False
    else:
        return None
    whole = slices[0]
    for other in slices[1:]:
        if (other.name, other.whole) != (whole.name, whole.whole) or other.parts != whole.parts:
            return None
        if other.start != whole.start + whole.size or not other.sliced:
            return None
        whole = replace(whole, size=whole.size + other.size)
    return whole, selected


def _reshape(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout | None:
    return layout.reshaped(shape)


def _permute(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout:
    order = kwargs.get("dims", args[0] if args and not isinstance(args[0], int) else args)
    return layout.reordered([at % len(layout.axes) for at in order])


def _transpose(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout:
    given = [*args, *kwargs.values()]
    order = list(range(len(layout.axes)))
    left, right = (given[at] % len(order) for at in (0, 1))
    order[left], order[right] = order[right], order[left]
    return layout.reordered(order)


def _movedim(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout:
    given = [*args, *kwargs.values()]
    count = len(layout.axes)
    pairs = [([x] if isinstance(x, int) else list(x)) for x in given[:2]]
    moved = {to % count: at % count for at, to in zip(*pairs, strict=True)}
    rest = iter([at for at in range(count) if at not in moved.values()])
    return layout.reordered([moved[to] if to in moved else next(rest) for to in range(count)])


def _last_two(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout:
    order = list(range(len(layout.axes)))
    return layout.reordered([*order[:-2], order[-1], order[-2]])


def _expand(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout:
    more = len(shape) - len(layout.axes)
    axes = [()] * more + list(layout.axes)
    known = (1,) * more + layout.shape
    for at, (size, now) in enumerate(zip(known, shape, strict=True)):
        if size != now:
            axes[at] = (Factor("repeated", now),)
    return replace(layout, axes=tuple(axes))


def _getitem(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout | None:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if any(not isinstance(x, (int, slice, type(None), type(Ellipsis))) for x in index):
        return None
    used = sum(x is not None and x is not Ellipsis for x in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    middle = index.index(Ellipsis)
    index = (*index[:middle], *[slice(None)] * (len(layout.axes) - used), *index[middle + 1 :])
    at = 0
    for one in index:
        if one is None:
            layout = replace(layout, axes=(*layout.axes[:at], (), *layout.axes[at:]))
        elif isinstance(one, int):
            layout = layout.select(at, one % layout.shape[at])
            continue
        else:
            start, stop, step = one.indices(layout.shape[at])  # pyright: ignore[reportAttributeAccessIssue]
            if step != 1:
                return None
            layout = layout.sliced(at, start, stop - start)
        at += 1
    return layout


def _select(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout:
    at, index = [*args, *kwargs.values()][:2]
    at = at % len(layout.axes)
    return layout.select(at, index % layout.shape[at])


def _narrow(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout:
    at, start = [*args, *kwargs.values()][:2]
    at = at % len(layout.axes)
    return layout.sliced(at, start % layout.shape[at], shape[at])


def _split(layout: AxisLayout, args: Any, kwargs: Any, shapes: Any) -> list[AxisLayout]:
    at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(layout.axes)
    found, start = [], 0
    for shape in shapes:
        found.append(layout.sliced(at, start, shape[at]))
        start += shape[at]
    return found


def _unbind(layout: AxisLayout, args: Any, kwargs: Any, shapes: Any) -> list[AxisLayout]:
    at = (args[0] if args else kwargs.get("dim", 0)) % len(layout.axes)
    return [layout.select(at, index) for index in range(len(shapes))]


def _both(*names: str) -> set[Any]:
    """Give functions of these names, in torch and as methods."""
    found = {getattr(owner, name, None) for owner in (torch, torch.Tensor) for name in names}
    return found - {None}


_PROJECTIONS = {F.linear, F.embedding, torch.addmm}
_JOINS = _both("cat", "concat", "concatenate", "stack")
_RESHAPES = _both(
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"
)
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_both("permute"), _permute),
    **dict.fromkeys(_both("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(_both("movedim", "moveaxis"), _movedim),
    **dict.fromkeys((getattr(torch.Tensor, name).__get__ for name in ("mT", "mH")), _last_two),
    **dict.fromkeys(_both("expand", "expand_as", "repeat_interleave"), _expand),
    **dict.fromkeys((torch.Tensor.__getitem__,), _getitem),
    **dict.fromkeys(_both("select"), _select),
    **dict.fromkeys(_both("narrow"), _narrow),
    **dict.fromkeys(_both("split", "chunk", "tensor_split", "split_with_sizes"), _split),
    **dict.fromkeys(_both("unbind"), _unbind),
}
# The shape stays, and the order does not.
REORDERS = _both("flip", "roll", "index_select", "gather", "take_along_dim", "sort", "flipud")
