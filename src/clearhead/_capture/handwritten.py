"""Attention written as matmul, softmax, matmul: recognised from the calls themselves."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from clearhead._capture.axes import AxisLayout, paired_axes, paired_letters, scored
from clearhead._capture.handler import Handler, in_short
from clearhead._capture.modules import Sites
from clearhead._capture.products import (
    NO_SCORES,
    Axes,
    ValueProduct,
    axes_of,
    described,
    is_by_position,
    mixing_reason,
    sums_positions,
)
from clearhead._capture.provenance import (
    CONTRACTIONS,
    DIVISIONS,
    DROPOUTS,
    EXPONENTIALS,
    LOG_SOFTMAXES,
    MULTIPLICATIONS,
    PRODUCTS,
    SOFTMAXES,
    Origin,
    Provenance,
    Softmax,
    tensors,
    version,
)
from clearhead._core import has_values, unobserved

__all__ = ["HANDWRITTEN", "Handwritten", "folding"]


class Handwritten:
    """Follows scores from a product to a softmax, and weights from there to a value.

    Its methods run the function that they are given.
    """

    def __init__(self, handler: Handler, provenance: Provenance, sites: Sites) -> None:
        self._handler, self._provenance, self._sites = handler, provenance, sites
        self._pending: dict[int, str] = {}
        # The modules that mix positions in a form that is not followed, with the reason.
        self.mixing: dict[str, str] = {}

    @property
    def unmet(self) -> set[str]:
        """The modules with a softmax of a product that was not multiplied by a value yet."""
        return set(self._pending.values())

    def softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a softmax; of the product of two activations its result may be weights."""
        scores = args[0] if args else kwargs["input"]
        origin = self._provenance.origin(scores)
        if not isinstance(scores, Tensor) or not self._sites.listening:
            return self._provenance.run(func, args, kwargs)
        if origin is None or origin.product is None or not scores.ndim:
            weights = self._provenance.run(func, args, kwargs)
            self._mark_opaque(scores, weights)
            return weights
        if kwargs.get("out") is not None:
            scores = scores.clone()  # it may be written over
        weights = func(*args, **kwargs)
        dim = kwargs["dim"] if "dim" in kwargs else (args[1] if len(args) > 1 else None)
        dim = (_implicit_axis(scores.ndim) if dim is None else dim) % scores.ndim
        if func in LOG_SOFTMAXES:
            self._provenance.mark(weights, replace(origin, log=(scores, dim)))
        else:
            self._remember(origin, scores, weights, dim)
        return weights

    def _mark_opaque(self, scores: Tensor, weights: Tensor) -> None:
        """Mark the softmax of what is no product: it may be attention, unseen."""
        origin = self._provenance.origin(scores)
        if origin is None and self._provenance.learned(scores):
            return
        if origin is None:
            origin = Origin(self._provenance.root(), foreign=True)
        layout = self._provenance.layouts.of(scores)
        gates = layout is not None and any(x.of_width for x in layout.axes[-1])
        square = scores.ndim > 1 and scores.shape[-1] == scores.shape[-2]
        mixes = square and not gates and is_by_position(weights, self._sites.positions)
        found = Origin(origin.root, foreign=origin.foreign, opaque=True, mixes=mixes)
        self._provenance.mark(weights, found)

    def dropout(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run dropout; the weights before it are kept where it writes over them."""
        given = args[0] if args else kwargs.get("input")
        origin = self._provenance.origin(given)
        found = None if origin is None else origin.softmax
        if found is not None and _shares(given, found.weights) and _in_place(func, args, kwargs):  # pyright: ignore[reportArgumentType]
            edited = found.edited
            found.weights = found.weights.clone()
            found.versions = version(found.scores), version(found.weights)
            found.written = found.written or edited
        return self._provenance.run(func, args, kwargs)

    def exponential(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an exponential; divided by its sum it is a softmax."""
        origin = self._provenance.origin(args[0]) if args else None
        if origin is None or origin.product is None or not self._sites.listening:
            return self._provenance.run(func, args, kwargs)
        if origin.log is not None:
            scores, dim = origin.log
            if origin.order is not None and len(origin.order) == scores.ndim:
                scores, dim = scores.permute(origin.order), origin.order.index(dim)
            out = func(*args, **kwargs)
            self._remember(origin, scores, out, dim, divided=True)
            return out
        scores = args[0].clone() if func is torch.Tensor.exp_ else args[0]
        out = func(*args, **kwargs)
        self._provenance.mark(out, replace(origin, exp=scores))
        return out

    def division(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a division; of an exponential by its sum over the last axis it ends a softmax."""
        out = self._provenance.run(func, args, kwargs)
        origin = self._provenance.origin(args[0]) if len(args) == 2 else None
        if origin is None or origin.exp is None or not isinstance(args[1], Tensor):
            return out
        scores, total = origin.exp, args[1]
        if total.shape == (*scores.shape[:-1], 1) and out.shape == scores.shape:
            with torch._C.DisableTorchFunction():
                # A factor of 0 after the exponential is a mask as well.
                scores = scores.masked_fill(out == 0, -math.inf)
            self._remember(origin, scores, out, scores.ndim - 1, divided=True)
        return out

    def _remember(
        self, origin: Origin, scores: Tensor, weights: Tensor, dim: int, divided: bool = False
    ) -> None:
        assert origin.product is not None
        heads = (origin.heads or getattr(_folded, "heads", None)) if scores.ndim == 3 else None
        module, scale = self._sites.running, origin.scale
        found = Softmax(scores, weights, dim, origin.product, heads, module, scale)
        found.versions, found.divided = (version(scores), version(weights)), divided
        self._pending[id(found)] = module
        self._provenance.mark(weights, Origin(origin.root, softmax=found))
        layouts = self._provenance.layouts
        layouts.mark(weights, layouts.of(scores))

    def product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a matrix product: of query and key, of weights and value, or another one."""
        out = func(*args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name != "out"}
        operands = list(tensors((args, given)))[-2:]
        if len(operands) < 2 or not self._sites.listening or not out.is_floating_point():
            self._provenance.follow(func, args, kwargs, out)
            return out
        for at, weights in enumerate(operands):
            origin = self._provenance.origin(weights)
            if origin is not None and origin.exp is not None and not at:
                origin = self._normalized(origin, weights)
            if origin is None:
                continue
            if origin.softmax is None:
                continue
            if not origin.softmax.used:
                pair, into = (weights, operands[1 - at]), kwargs.get("out") is not None
                return self._attention(
                    ValueProduct(func, args, out, origin, origin.softmax, *pair, at, into)
                )
            self._elsewhere(origin.softmax, "its weights are multiplied by several values")
        if any(self._projects(x) for x in operands):
            self._provenance.follow(func, args, kwargs, out)
        else:
            self._report_mixing(operands)
            more = func is torch.einsum and len(list(tensors(args))) > 2
            self._mark_scores(operands, out, None if more else kwargs.get("alpha", 1.0))
            self._provenance.layouts.mark(out, self._scored(func, args, operands, out))
        return out

    def _normalized(self, origin: Origin, weights: Tensor) -> Origin | None:
        """Take an exponential for a softmax where its rows sum to one, or to zero."""
        scores = origin.exp
        if scores is None or origin.order or weights.shape != scores.shape or not scores.numel():
            return origin
        if self._sites.unreadable([weights]) or not has_values(weights):
            return origin
        with torch._C.DisableTorchFunction(), torch.no_grad(), unobserved(weights):
            total = weights.float().sum(-1)
            off = torch.minimum((total - 1).abs(), total.abs()).max().item()
            if not off <= 1e-4 + 8 * torch.finfo(weights.dtype).eps:
                return origin
            scores = scores.masked_fill(weights == 0, -math.inf)
        self._remember(origin, scores, weights, scores.ndim - 1, divided=True)
        return self._provenance.origin(weights)

    def _report_mixing(self, operands: list[Tensor]) -> None:
        """Report attention of a form that is not followed, where its weights meet a value."""
        origins = [self._provenance.origin(x) for x in operands]
        for at, (origin, x) in enumerate(zip(origins, operands, strict=True)):
            known = origins[1 - at] is not None
            reason = mixing_reason(origin, x, at, known, self._sites.positions)
            if reason is not None:
                self.mixing.setdefault(self._sites.running, reason)

    def _scored(
        self, func: Any, args: tuple[Any, ...], operands: list[Tensor], out: Tensor
    ) -> AxisLayout | None:
        """Follow the axes of query and key into their product."""
        left, right = (self._provenance.layouts.begun(x) for x in operands)
        if func is torch.einsum:
            pairs = paired_letters(args[0], operands) if isinstance(args[0], str) else None
        else:
            pairs = paired_axes(left, right, out.ndim)
        return None if pairs is None else scored(left, right, pairs)

    def multiplication(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an elementwise product; with one more axis than the weights have, of values."""
        out = self._provenance.run(func, args, kwargs)
        for operand in args[:2]:
            origin = self._provenance.origin(operand)
            if origin is None or origin.softmax is None or not isinstance(out, Tensor):
                continue
            if out.ndim > origin.softmax.ndim:
                self._elsewhere(origin.softmax, "its weights are multiplied by values one by one")
        if isinstance(out, Tensor):
            operands = list(tensors(args[:2]))
            if len(operands) == 2 and all(x.shape != out.shape for x in operands):
                self._report_unfollowed(operands)  # each has axes that the other has not
        return out

    def contraction(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a product of a form that is not followed: of two activations it may be attention."""
        if self._sites.listening and not any(map(self._provenance.learned, tensors(args))):
            self._report_unfollowed(tensors(args))
        return self._provenance.run(func, args, kwargs)

    def _report_unfollowed(self, operands: Iterable[Tensor]) -> None:
        """Report weights between positions, of no product, that meet an activation."""
        origins = [self._provenance.origin(x) for x in operands]
        weights = [x for x in origins if x and x.opaque and x.mixes and not x.foreign]
        if weights and any(x and not x.opaque for x in origins):
            self.mixing.setdefault(self._sites.running, NO_SCORES)

    def _elsewhere(self, found: Softmax, reason: str) -> None:
        """Report weights that meet a value in a product that is no call."""
        found.elsewhere = reason
        if found.used:
            self._handler.elsewhere(found.module, reason)

    def other_use(self, found: Softmax) -> None:
        """Report weights of a call that meet an activation in another function as well."""
        self._elsewhere(found, "its weights meet other activations than the values")

    def _projects(self, x: Tensor) -> bool:
        """Whether an operand is a weight of the model: then the product is a projection."""
        return self._provenance.learned(x) or (isinstance(x._base, Parameter) and x.ndim <= 2)

    def _mark_scores(self, operands: list[Tensor], out: Tensor, alpha: float | None) -> None:
        """Mark the product of two activations: it may be scores."""
        origins = [self._provenance.origin(x) for x in operands]
        left, right = (
            origin.root if origin else self._provenance.root(x)
            for origin, x in zip(origins, operands, strict=True)
        )
        foreign = [origin is None or origin.foreign for origin in origins]
        if self._sites.of_modules and any(foreign):
            # Not from what the model was given: what it descends from is not known.
            left = right = right if foreign[0] else left
        positions = self._sites.positions
        mixes = None not in origins and (
            is_by_position(out, positions) or sums_positions(*operands, out, positions)  # pyright: ignore[reportCallIssue]
        )
        known = [origin for origin in origins if origin]
        heads = next((origin.heads for origin in known if origin.heads), None)
        scales = [alpha, *(origin.scale for origin in known)]
        scale = None if None in scales else math.prod(scales)  # pyright: ignore[reportArgumentType, reportCallIssue]
        origin = Origin(left, product=(left, right), heads=heads, scale=scale, mixes=mixes)
        self._provenance.mark(out, origin)

    def _attention(self, product: ValueProduct) -> Tensor:
        """Report a product of weights and value to the handler, which may change the context."""
        found, out = product.softmax, product.out
        self._pending.pop(id(found), None)
        layout = self._provenance.layouts.of(product.weights)
        axes = self._axes(product, layout)
        if axes is None:
            return out
        interface = self._sites.interface
        try:
            call, fold = described(product, axes, layout)
            context = out.permute(axes.context)
        except Exception as error:  # what a model does must run, described or not
            self._handler.failed(found.module, f"its call could not be read ({in_short(error)})")
            return out
        found.used = True
        how = "eager" if interface else "handwritten"
        call = replace(call, key=interface.key if interface else None, how=how)
        located = self._sites.locate(call, found.roots)
        with torch._C.DisableTorchFunction():
            four = fold.split(context)
            changed = self._handler.after(located, four)
        if changed is not None:
            back = [axes.context.index(axis) for axis in range(out.ndim)]
            changed = fold.join(changed, context.shape[:-2]).permute(back)
            out = out.copy_(changed) if product.into else changed
        if found.elsewhere:
            self._handler.elsewhere(found.module, found.elsewhere)
        found.scores = found.weights = out.new_empty(0)
        self._sites.seen()
        made = located.module if located.sizes.head == 1 else ""
        self._provenance.mark(out, Origin(product.origin.root, made=made))
        return out

    def join(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a concatenation; of the contexts of several modules it joins heads."""
        out = self._provenance.run(func, args, kwargs)
        parts = args[0] if args else kwargs["tensors"]
        origins = [self._provenance.origin(x) for x in parts]
        made = dict.fromkeys(origin.made for origin in origins if origin)
        if len(made) == len(origins) > 1 and "" not in made:
            self._handler.joined(list(made))
        return out

    def _axes(self, product: ValueProduct, layout: AxisLayout | None) -> Axes | None:
        """Find the axes of a product, or report why there are none."""
        found = product.softmax
        reason = self._sites.unreadable([product.weights, product.value, found.scores])
        if reason is not None:
            self._handler.failed(found.module, reason)
            self._sites.seen()
            return None
        axes = axes_of(product, layout)
        if isinstance(axes, Axes):
            return axes
        found.elsewhere = axes
        self._handler.unseen(found.module, axes)
        return None


def _implicit_axis(ndim: int) -> int:
    """Give the axis that `F.softmax` takes where none is given."""
    return 0 if ndim in (0, 1, 3) else 1


def _shares(tensor: Tensor, other: Tensor) -> bool:
    """Whether a tensor is another one, or a view of the same."""
    one, two = (x if x._base is None else x._base for x in (tensor, other))
    return one is two


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of dropout writes over its input."""
    return func.__name__.endswith("_") or bool(kwargs.get("inplace", args[3:4] == (True,)))


# How many heads torch's own multi-head function, while it runs in this thread, has in the batch.
_folded = threading.local()


@contextlib.contextmanager
def folding(heads: int) -> Iterator[None]:
    """Take three-dimensional scores made inside the block for those of so many heads."""
    before = getattr(_folded, "heads", None)
    _folded.heads = heads
    try:
        yield
    finally:
        _folded.heads = before


# What a call of each function is handled by.
HANDWRITTEN = {
    **dict.fromkeys(SOFTMAXES | LOG_SOFTMAXES, Handwritten.softmax),
    **dict.fromkeys(DROPOUTS, Handwritten.dropout),
    **dict.fromkeys(PRODUCTS, Handwritten.product),
    **dict.fromkeys((torch.cat, torch.concat, torch.stack, torch.hstack), Handwritten.join),
    **dict.fromkeys((torch.vstack, torch.dstack, torch.column_stack), Handwritten.join),
    **dict.fromkeys(EXPONENTIALS, Handwritten.exponential),
    **dict.fromkeys(DIVISIONS, Handwritten.division),
    **dict.fromkeys(MULTIPLICATIONS, Handwritten.multiplication),
    **dict.fromkeys(CONTRACTIONS, Handwritten.contraction),
}
