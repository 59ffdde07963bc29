"""How the axes of a result follow from those of its arguments, for each function of torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parameter import Parameter

from clearhead._capture.axes.layout import AxisLayout, Factor, fresh

__all__ = ["REORDERS", "Layouts"]


class Layouts:
    """A table from live tensors to their layouts."""

    def __init__(self) -> None:
        self._table: dict[int, tuple[weakref.ref[Tensor], AxisLayout]] = {}

    def of(self, tensor: object) -> AxisLayout | None:
        """Look a tensor up."""
        found = self._table.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def mark(self, tensor: Any, layout: AxisLayout | None) -> None:
        """Set the layout of a tensor, where it is known."""
        if layout is None or not isinstance(tensor, Tensor) or layout.shape != tuple(tensor.shape):
            return
        key, table = id(tensor), self._table

        def forget(ref: weakref.ref[Tensor]) -> None:
            if key in table and table[key][0] is ref:
                del table[key]

        table[key] = (weakref.ref(tensor, forget), layout)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Mark what a call returned."""
        if func in _PROJECTIONS:
            self.mark(out, fresh(out.shape))
        elif func in _JOINS:
            self._join(func, args, kwargs, out)
        elif func in _RULES:
            layout = self.begun(args[0]) if args else None
            if layout is not None:
                self._apply(func, layout, args, kwargs, out)
        elif isinstance(out, Tensor) and func not in REORDERS and out.is_floating_point():
            self.mark(out, self._alike(args, out))

    def _alike(self, args: tuple[Any, ...], out: Tensor) -> AxisLayout | None:
        """Give the layout of an argument of the shape of the result: a function of each number."""
        for given in args:
            layout = self.of(given) if isinstance(given, Tensor) else None
            if layout is not None and given.shape == out.shape:
                return layout
        return None

    def begun(self, source: Any) -> AxisLayout | None:
        """Look up a tensor that is viewed; an unknown activation is taken for a projection."""
        if not isinstance(source, Tensor) or not source.is_floating_point():
            return None
        layout = self.of(source)
        return layout or (None if isinstance(source, Parameter) else fresh(source.shape))

    def _apply(
        self, func: Any, layout: AxisLayout, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        try:
            made = _RULES[func](layout, args[1:], kwargs, out)
        except (IndexError, TypeError, ValueError, KeyError):
            return  # arguments that no rule knows: the axes are not known either
        outs = out if isinstance(out, (tuple, list)) else [out]
        mades = made if isinstance(made, list) else [made]
        for tensor, one in zip(outs, mades, strict=True):
            self.mark(tensor, one)

    def _join(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Follow `cat` and `stack`: slices that lie side by side are whole again."""
        given = args[0] if args else kwargs["tensors"]
        at = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        known = [self.of(x) for x in given]
        layouts = [layout for layout in known if layout is not None]
        if not layouts or not isinstance(out, Tensor):
            return
        at = at % out.ndim
        axis = (
            _side_by_side(layouts, at, func is torch.stack) if len(layouts) == len(known) else None
        )
        first, size = layouts[0], out.shape[at]
        if func is torch.stack:
            first = replace(first, axes=(*first.axes[:at], (), *first.axes[at:]))
        if axis is not None:
            first = replace(first, selected=first.selected[:-1]) if axis[1] else first
            axis = (axis[0], *first.axes[at]) if axis[1] else (axis[0],)
        other = (Factor("w" if at == out.ndim - 1 else "joined", size),) if size > 1 else ()
        self.mark(out, first.with_axis(at, axis or other))


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


def _reshape(layout: AxisLayout, args: Any, kwargs: Any, out: Tensor) -> AxisLayout | None:
    return layout.reshaped(out.shape)


def _permute(layout: AxisLayout, args: Any, kwargs: Any, out: Tensor) -> AxisLayout:
    order = kwargs.get("dims", args[0] if args and not isinstance(args[0], int) else args)
    return layout.reordered([at % len(layout.axes) for at in order])


def _transpose(layout: AxisLayout, args: Any, kwargs: Any, out: Tensor) -> AxisLayout:
    given = [*args, *kwargs.values()]
    order = list(range(len(layout.axes)))
    left, right = (given[at] % len(order) for at in (0, 1))
    order[left], order[right] = order[right], order[left]
    return layout.reordered(order)


def _movedim(layout: AxisLayout, args: Any, kwargs: Any, out: Tensor) -> AxisLayout:
    given = [*args, *kwargs.values()]
    count = len(layout.axes)
    pairs = [([x] if isinstance(x, int) else list(x)) for x in given[:2]]
    moved = {to % count: at % count for at, to in zip(*pairs, strict=True)}
    rest = iter([at for at in range(count) if at not in moved.values()])
    return layout.reordered([moved[to] if to in moved else next(rest) for to in range(count)])


def _last_two(layout: AxisLayout, args: Any, kwargs: Any, out: Tensor) -> AxisLayout:
    order = list(range(len(layout.axes)))
    return layout.reordered([*order[:-2], order[-1], order[-2]])


def _expand(layout: AxisLayout, args: Any, kwargs: Any, out: Tensor) -> AxisLayout:
    more = out.ndim - len(layout.axes)
    axes = [()] * more + list(layout.axes)
    known = (1,) * more + layout.shape
    for at, (size, now) in enumerate(zip(known, out.shape, strict=True)):
        if size != now:
            axes[at] = (Factor("repeated", now),)
    return replace(layout, axes=tuple(axes))


def _getitem(layout: AxisLayout, args: Any, kwargs: Any, out: Tensor) -> AxisLayout | None:
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


def _select(layout: AxisLayout, args: Any, kwargs: Any, out: Tensor) -> AxisLayout:
    at, index = [*args, *kwargs.values()][:2]
    at = at % len(layout.axes)
    return layout.select(at, index % layout.shape[at])


def _narrow(layout: AxisLayout, args: Any, kwargs: Any, out: Tensor) -> AxisLayout:
    at, start = [*args, *kwargs.values()][:2]
    at = at % len(layout.axes)
    return layout.sliced(at, start % layout.shape[at], out.shape[at])


def _split(layout: AxisLayout, args: Any, kwargs: Any, out: Sequence[Tensor]) -> list[AxisLayout]:
    at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(layout.axes)
    found, start = [], 0
    for piece in out:
        found.append(layout.sliced(at, start, piece.shape[at]))
        start += piece.shape[at]
    return found


def _unbind(layout: AxisLayout, args: Any, kwargs: Any, out: Sequence[Tensor]) -> list[AxisLayout]:
    at = (args[0] if args else kwargs.get("dim", 0)) % len(layout.axes)
    return [layout.select(at, index) for index in range(len(out))]


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
