"""How the axes of a result follow from those of its arguments, for each function of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._capture.axes.joins import appended, joined
from clearhead._capture.axes.layout import REPEATED, AxisLayout, Factor, fresh
from clearhead._capture.axes.marks import Marks, is_parameter

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
            by_activation = func is F.linear and any(map(self._marks.step, args[1:2]))
            return None if by_activation else Given(out.shape)
        if func in _JOINS:
            return self._join(func, args, kwargs, out)
        if func in _RULES:
            source = self._begun(args[0]) if args else None
            given = (args[1:], kwargs) if func not in _INDEXED else _without_indices(args, kwargs)
            return source and _applied(_RULES[func], source, given, out)
        if func is torch.einsum and len(args) == 2 and isinstance(args[0], str):
            source = self._begun(args[1])
            return source and _applied(_einsum, source, (args[:1], kwargs), out)
        if isinstance(out, Tensor) and func not in REORDERS and out.is_floating_point():
            return self._alike(args, out)
        return None

    def _begun(self, source: Any) -> Inferred | None:
        if not isinstance(source, Tensor) or not source.is_floating_point():
            return None
        step = self._marks.step(source)
        if step is None and not is_parameter(source):
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
        named: int = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        at = _STACKS.get(func, named)
        steps: list[Inferred | None] = [self._marks.step(x) for x in given]
        if not isinstance(out, Tensor) or not any(steps):
            return None
        if any(x.ndim != out.ndim - (func is torch.stack) for x in given):
            return None  # these got axes of their own
        return Inferred(joined, steps, (at % out.ndim, func is torch.stack), out.shape)


def _applied(
    rule: Callable[..., Any], source: Inferred, given: tuple[Any, Any], out: Any
) -> Inferred | list[Inferred]:
    if isinstance(out, Tensor):
        return Inferred(rule, source, given, out.shape)
    every = Inferred(rule, source, given, [x.shape for x in out])
    return [Inferred(_item, every, (index,), x.shape) for index, x in enumerate(out)]


def _without_indices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Give the arguments without tensors and lists, which a step must not keep alive."""
    return tuple(map(_bare, args[1:])), {name: _bare(x) for name, x in kwargs.items()}


def _bare(given: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(map(_bare, given))
    return [] if isinstance(given, (Tensor, list)) else given


def _item(layouts: list[AxisLayout], index: int, shape: Any) -> AxisLayout:
    return layouts[index]


def _reshape(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout | None:
    return layout.reshaped(shape)


def _permute(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout:
    order = kwargs.get("dims", args[0] if args and not isinstance(args[0], int) else args)
    return layout.reordered([at % len(layout.axes) for at in order])


def _einsum(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout | None:
    """Follow an einsum of one operand that gives its axes another order."""
    given, _, wanted = args[0].replace(" ", "").partition("->")
    if sorted(given) != sorted(wanted) or len({*given}) != len(layout.axes):
        return None
    return layout.reordered([given.index(letter) for letter in wanted])


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
            axes[at] = (Factor(REPEATED, now),)
    return replace(layout, axes=tuple(axes))


def _getitem(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout | None:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if any(not isinstance(x, (int, slice, type(None), type(Ellipsis))) for x in index):
        return _picked(layout, index, shape)
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
            mixed = layout.mixed(at, len(range(start, stop, step))) if step != 1 else layout
            if mixed is None:
                return None
            layout = mixed if step != 1 else layout.sliced(at, start, stop - start)
        at += 1
    return layout


def _picked(layout: AxisLayout, index: Any, shape: Sequence[int]) -> AxisLayout | None:
    """Follow an index of one list or tensor, where all of the other axes stay."""
    plain = [isinstance(x, slice) and x == slice(None) for x in index]
    dots = next((at for at, x in enumerate(index) if x is Ellipsis), len(index))
    at = next(at for at, x in enumerate(index) if not plain[at] and x is not Ellipsis)
    if len(shape) != len(layout.axes) or sum(plain) + (dots < len(index)) + 1 != len(index):
        return None
    at = at if at < dots else at - len(index) + len(shape)
    return layout.mixed(at, shape[at])


def _reordered(named: str, first: int) -> Callable[..., AxisLayout | None]:
    """Make the rule of a function whose argument of that name and place tells axes."""

    def rule(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout | None:
        given = kwargs[named] if named in kwargs else args[first]
        several = args[first:] if isinstance(given, int) and named == "dims" else given
        for at in [several] if isinstance(several, int) else several:
            mixed = layout.mixed(at % len(shape), shape[at])
            if mixed is None:
                return None
            layout = mixed
        return layout

    return rule


def _pad(layout: AxisLayout, args: Any, kwargs: Any, shape: Sequence[int]) -> AxisLayout | None:
    """Follow padding behind the positions alone."""
    given = kwargs["pad"] if "pad" in kwargs else args[0]
    widths = [tuple(given[at : at + 2]) for at in range(0, len(given), 2)]
    padded = [at for at, pair in enumerate(widths) if pair != (0, 0)]
    if len(padded) != 1 or padded == [0] or widths[padded[0]][0]:
        return None
    at = len(shape) - 1 - padded[0]
    return layout.with_axis(at, (appended(layout.axes[at], shape[at]),))


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
# What joins along an axis of its own.
_STACKS = {torch.vstack: 0, torch.row_stack: 0, torch.hstack: 1, torch.column_stack: 1}
_STACKS[torch.dstack] = 2
_JOINS = _both("cat", "concat", "concatenate", "stack") | _STACKS.keys()
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
    F.pad: _pad,
    **dict.fromkeys(_both("flip"), _reordered("dims", 0)),
    **dict.fromkeys(_both("roll"), _reordered("dims", 1)),
    **dict.fromkeys(_both("index_select", "gather"), _reordered("dim", 0)),
    **dict.fromkeys(_both("take_along_dim"), _reordered("dim", 1)),
}
# What takes indices, of which no rule reads the numbers.
_INDEXED = {torch.Tensor.__getitem__, *_both("index_select", "gather", "take_along_dim")}
# The shape stays, and the order does not.
REORDERS = _both("flip", "roll", "index_select", "gather", "take_along_dim", "sort", "flipud")
