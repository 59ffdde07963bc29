"""Where tensors come from, followed from call to call: how handwritten attention is recognised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from clearhead._capture.axes import REORDERS, Layouts, Marks, is_parameter

__all__ = [
    "CONTRACTIONS",
    "DIVISIONS",
    "DROPOUTS",
    "EXPONENTIALS",
    "LOG_SOFTMAXES",
    "MULTIPLICATIONS",
    "PRODUCTS",
    "SOFTMAXES",
    "Origin",
    "Provenance",
    "Softmax",
    "tensors",
    "version",
]

PRODUCTS = {
    torch.matmul,
    torch.bmm,
    torch.mm,
    torch.baddbmm,
    torch.einsum,
    torch.linalg.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.Tensor.bmm,
    torch.Tensor.mm,
    torch.Tensor.baddbmm,
}
# Products that are not followed.
CONTRACTIONS = {F.linear, F.bilinear, torch.tensordot, torch.inner, torch.linalg.vecdot}
CONTRACTIONS |= {torch.linalg.multi_dot, torch.chain_matmul, torch.Tensor.inner}
SOFTMAXES = {F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax}
LOG_SOFTMAXES = {F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax}
LOG_SOFTMAXES |= {torch.special.log_softmax}
EXPONENTIALS = {torch.exp, torch.Tensor.exp, torch.Tensor.exp_}
DIVISIONS = {torch.div, torch.true_divide, torch.divide, torch.Tensor.div, torch.Tensor.divide}
DIVISIONS |= {torch.Tensor.__truediv__, torch.Tensor.div_, torch.Tensor.__itruediv__}
_INSERTS = {torch.cat, torch.concat, torch.Tensor.index_copy_, torch.Tensor.copy_}
_INSERTS |= {torch.Tensor.index_copy, torch.Tensor.__setitem__, torch.Tensor.scatter_}
_FORGET = {torch.nn.functional.embedding, torch.argmax, torch.Tensor.argmax}
DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.dropout_}
DROPOUTS |= {F.alpha_dropout, F.feature_alpha_dropout, torch.feature_dropout_}
MULTIPLICATIONS = {torch.mul, torch.multiply, torch.Tensor.mul, torch.Tensor.multiply}
MULTIPLICATIONS |= {torch.Tensor.__mul__, torch.Tensor.__rmul__}
_FACTORS = {
    **dict.fromkeys(MULTIPLICATIONS | {torch.Tensor.mul_, torch.Tensor.__imul__}, True),
    **dict.fromkeys((torch.div, torch.true_divide, torch.divide, torch.Tensor.divide), False),
    **dict.fromkeys((torch.Tensor.div, torch.Tensor.div_, torch.Tensor.true_divide), False),
    **dict.fromkeys((torch.Tensor.__truediv__, torch.Tensor.__itruediv__), False),
}
_PROJECTIONS = {F.linear, torch.addmm, F.conv1d, F.conv2d, F.conv3d, F.layer_norm}
_SWAPS = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
_SWAPS |= {
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in (
        "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "adjoint", "t",
    )
}  # fmt: skip
_SHAPES = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten}
# What gives the same numbers, in another order, shape or dtype.
_MOVES = _SWAPS | _SHAPES | {torch.flatten, torch.squeeze, torch.unsqueeze, torch.clone}
_MOVES |= {torch.movedim, torch.swapaxes, torch.swapdims, torch.narrow, torch.select, torch.detach}
_MOVES |= {torch.split, torch.chunk, torch.unbind, torch.Tensor.__getitem__}
_MOVES |= {
    getattr(torch.Tensor, name)
    for name in (
        "to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone",
        "detach", "cpu", "cuda", "expand", "expand_as", "squeeze", "unsqueeze", "unflatten",
        "view_as", "reshape_as", "movedim", "swapdims", "narrow", "select", "split", "chunk",
        "unbind", "requires_grad_",
    )
}  # fmt: skip


def version(tensor: Tensor) -> int | None:
    """Give how often a tensor was written to, where that is counted."""
    return None if tensor.is_inference() else tensor._version


@dataclass(eq=False)
class Softmax:
    """A softmax over the product of two activations: attention, once it multiplies a value."""

    scores: Tensor  # as the model gave them to the softmax
    weights: Tensor
    dim: int
    roots: tuple[int, int]
    heads: int | None
    module: str
    scale: float | None
    used: bool = False  # whether its weights were multiplied by a value
    written: bool = False  # whether scores or weights were written to after the softmax
    versions: tuple[int | None, int | None] = (None, None)  # of scores and weights, as made
    divided: bool = False  # whether it is an exponential that was divided by something
    elsewhere: str = ""  # how the weights meet a value in a product that is no call

    def __post_init__(self) -> None:
        self.ndim = self.scores.ndim

    @property
    def edited(self) -> bool:
        """Whether scores and weights may no longer be those of the softmax."""
        return self.written or self.versions != (version(self.scores), version(self.weights))


@dataclass(frozen=True)
class Origin:
    """What is known of a tensor: the input it descends from, and its role in an attention."""

    root: int
    product: tuple[int, int] | None = None  # of scores: the roots of query and key
    softmax: Softmax | None = None  # of weights
    order: tuple[int, ...] | None = None  # of weights: which axis of the softmax each axis is
    heads: int | None = None  # the size of the head axis that was folded into the batch
    dropped: bool = False  # whether dropout acted on it
    scale: float | None = 1.0  # the factor that multiplied it since its projection, where known
    exp: Tensor | None = None  # the scores whose exponential it is
    log: tuple[Tensor, int] | None = None  # the scores, and the axis, whose log-softmax it is
    mixes: bool = False  # of a product: whether it is of positions, or sums over them
    foreign: bool = False  # whether no function of torch made it
    opaque: bool = False  # whether it is a softmax of something that is no product
    made: str = ""  # of a context of one head: the module that made it
    edited: bool = False  # whether weights are more than moved: multiplied, clipped, ...
    given: bool = False  # whether it is of parameters alone, expanded over the samples


# The origin of what is computed from parameters alone.
_LEARNED = Origin(0)


class Provenance:
    """A table from live tensors to their origins; it keeps no tensor alive but softmax results."""

    def __init__(self) -> None:
        self._marks = Marks()
        self._roots = 0
        self.notify_nobody()
        self.layouts = Layouts(self._marks)

    def notify_nobody(self) -> None:
        """Forget who is notified of functions whose results cannot be followed."""
        self.on_error: Callable[[Any, Exception], None] = lambda func, error: None
        self.on_other_use: Callable[[Softmax], None] | None = None

    def origin(self, tensor: object) -> Origin | None:
        """Look a tensor up."""
        found = self._marks.origin(tensor)
        return None if found is _LEARNED else found

    def learned(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or computed from parameters alone."""
        return is_parameter(tensor) or self._marks.origin(tensor) is _LEARNED

    def mark(self, tensor: Tensor, origin: Origin) -> None:
        """Set the origin of a tensor."""
        self._marks.set_origin(tensor, origin)

    def root(self, *found: object) -> int:
        """Give the root of the first known tensor; an unknown activation becomes a root itself."""
        for tensor in found:
            origin = self.origin(tensor)
            if origin is not None:
                return origin.root
        self._roots += 1
        for tensor in found:
            if isinstance(tensor, Tensor) and not is_parameter(tensor):
                self.mark(tensor, Origin(self._roots, foreign=True))
        return self._roots

    def mark_inputs(self, given: Any) -> None:
        """Make the activations that a model is called with roots."""
        for tensor in tensors(given):
            if tensor.is_floating_point() and self._marks.origin(tensor) is None:
                self.mark(tensor, self._new())

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and follow where its result comes from."""
        out = func(*args, **kwargs)
        self.follow(func, args, kwargs, out)
        return out

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Let the result of a call inherit the origin of its (first) known argument."""
        try:
            self._follow(func, args, kwargs, out)
        except Exception as error:  # what a model does must run, followed or not
            self.on_error(func, error)
            return
        if self.on_other_use is None:
            return
        known = self.origin(out)
        softmax = None if known is None else known.softmax
        if softmax is not None and softmax.used and self._meets(softmax, (args, kwargs)):
            self.on_other_use(softmax)

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if not isinstance(out, (Tensor, tuple, list)):
            if func is torch.Tensor.__setitem__:
                self._written(args[0])
            return
        steps = self.layouts.follow(func, args, kwargs, out)
        known, learned = self._argument(func, args, kwargs)
        if known is None:
            self._mark_layouts(out, steps)
            if learned:
                self._mark_learned(args, out)
            return
        projects = func in _PROJECTIONS and self._by_weight(func, args)
        if projects or func in _FORGET or (learned and func in PRODUCTS):
            known = Origin(known.root)
        elif learned and known.product is None:
            known = replace(known, scale=1.0)
        elif func in DROPOUTS and _drops(*args, **kwargs):
            known = replace(known, dropped=True)
        elif func in _FACTORS and len(args) == 2:
            factor = args[1] if self.origin(args[0]) is not None else args[0]
            known = _scaled(known, factor, _FACTORS[func])
        if func in REORDERS:
            known = replace(known, heads=None)
        if known.softmax is not None and func not in _MOVES and func not in DROPOUTS:
            self._written(out)
            known = replace(known, edited=True)
        if known.log is not None and func not in _MOVES:
            known = replace(known, log=None)
        several = isinstance(steps, list)
        for at, tensor in enumerate(tensors(out)):
            if tensor.is_floating_point():
                origin = _inherit(known, func, args, kwargs, tensor)
                step = steps[at] if several else steps
                if step is None:
                    self._marks.set_origin(tensor, origin)
                else:
                    self._marks.set(tensor, origin, step)

    def _mark_layouts(self, out: Any, steps: Any) -> None:
        """Set the layouts of what comes from nothing that is known."""
        several = isinstance(steps, list)
        for at, tensor in enumerate(tensors(out) if steps is not None else ()):
            if tensor.is_floating_point():
                self._marks.set(tensor, None, steps[at] if several else steps)

    def _written(self, tensor: Any) -> None:
        """Note that weights, or a view of them, were written to."""
        origin = self.origin(tensor)
        if origin is not None and origin.softmax is not None:
            origin.softmax.written = True

    def _by_weight(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a projection is by a weight, and not by another activation."""
        return func is not F.linear or not any(map(self.origin, args[1:2]))

    def _meets(self, softmax: Softmax, given: Any) -> bool:
        """Whether weights, or what was computed from them, meet another activation."""
        found = [self.origin(x) for x in tensors(given)]
        return any(x and x.softmax is None for x in found) and any(
            x and x.softmax is softmax for x in found
        )

    def _mark_learned(self, args: tuple[Any, ...], out: Any) -> None:
        """Mark what is computed from parameters alone: weights that are cast, scaled, turned.

        Learned queries, which are expanded over the samples, are activations with a root.
        """
        shape = args[0].shape if args and isinstance(args[0], Tensor) else None
        for tensor in tensors(out):
            if tensor.is_floating_point():
                weight = tensor.ndim <= 2 or tensor.shape == shape
                self.mark(tensor, _LEARNED if weight else replace(self._new(), given=True))

    def _argument(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Origin | None, bool]:
        """Give the origin that a result inherits, and whether an argument is a parameter."""
        known, learned = None, func in _PROJECTIONS
        for tensor in tensors((args, kwargs) if kwargs else args):
            origin = self._marks.origin(tensor)
            learned = learned or origin is _LEARNED or is_parameter(tensor)
            if origin is None or origin is _LEARNED:
                continue
            inserts = func in _INSERTS and known is not None and not known.product
            inserts = inserts and not origin.given
            if known is None or inserts or (origin.softmax and not known.softmax):
                known = origin
        return (self._begin(func, args, kwargs) if known is None else known), learned

    def _begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Origin | None:
        """Make a root where an unknown activation meets a parameter."""
        if func is F.embedding:
            return self._new()
        found = list(tensors((args, kwargs)))
        if func not in _PROJECTIONS and not any(self.learned(x) for x in found):
            return None
        activations = [x for x in found if not self.learned(x) and x.is_floating_point()]
        projects = func in _PROJECTIONS or func in PRODUCTS
        if not activations:
            return self._new() if projects else None
        root = self.root(*activations[:1])
        return Origin(root, foreign=not projects)

    def _new(self) -> Origin:
        """Make a root of its own."""
        self._roots += 1
        return Origin(self._roots)


def _inherit(known: Origin, func: Any, args: Any, kwargs: Any, out: Tensor) -> Origin:
    source = args[0] if args and isinstance(args[0], Tensor) else None
    if source is None:
        return known
    if func in _SWAPS:
        followed = known.softmax is not None or known.exp is not None or known.log is not None
        return known if not followed else _reordered(known, func, source, args, kwargs)
    if out.shape != source.shape:
        if known.order is not None and out.ndim != source.ndim:
            known = replace(known, order=_LOST)
        elif func in _SHAPES and _folds(source, out):
            known = replace(known, heads=source.shape[-3])
    return known


# Weights whose axes cannot be told apart.
_LOST = (-1,)


def _reordered(known: Origin, func: Any, source: Tensor, args: Any, kwargs: Any) -> Origin:
    """Follow the axes of weights through a transposition, by that of an empty tensor."""
    before = known.order or tuple(range(source.ndim))
    probe = torch.empty(tuple(range(2, source.ndim + 2)), device="meta")
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        moved = func(probe, *args[1:], **kwargs)
    if len(before) != source.ndim:
        return known
    order = tuple(before[size - 2] for size in moved.shape)
    return replace(known, order=None if order == tuple(range(len(order))) else order)


def _folds(source: Tensor, out: Tensor) -> bool:
    """Whether the two axes before the last two were merged: heads folded into the batch."""
    if not source.ndim == out.ndim + 1 > 3:
        return False
    return out.shape[-2:] == source.shape[-2:] and out.shape[:-3] == source.shape[:-4]


def _scaled(known: Origin, factor: Any, multiplies: bool) -> Origin:
    """Follow multiplication or division by a number; scores by several have no one scale."""
    if isinstance(factor, Tensor):
        if factor.numel() != 1:
            return known if known.product is None else replace(known, scale=None)
        factor = _number(factor)
    if known.scale is None or factor is None:
        return replace(known, scale=None)
    return replace(known, scale=known.scale * factor if multiplies else known.scale / factor)


def _number(tensor: Tensor) -> float | None:
    """Read a tensor of one number; None where a mode or transform has no values."""
    try:
        return tensor.item()
    except Exception:  # each mode has an error of its own
        return None


def _drops(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Whether a call of dropout, with these arguments, drops anything."""
    return p > 0 and training


def tensors(tree: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for leaf in tree:
            if isinstance(leaf, Tensor):
                yield leaf
            elif isinstance(leaf, (tuple, list, dict)):
                yield from tensors(leaf)
    elif isinstance(tree, dict):
        yield from tensors(list(tree.values()))
