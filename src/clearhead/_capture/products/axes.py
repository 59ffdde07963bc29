"""The axes of a product of weights and values, whatever function computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead._capture.axes import AxisLayout, misread, parted
from clearhead._capture.products.einsum import Letters, read_equation
from clearhead._capture.provenance import Origin, Softmax, tensors

__all__ = ["Axes", "ValueProduct", "axes_of"]


@dataclass(frozen=True)
class ValueProduct:
    """A product of the weights of a softmax and a value."""

    func: Any
    args: tuple[Any, ...]
    out: Tensor
    origin: Origin  # of the weights
    softmax: Softmax
    weights: Tensor
    value: Tensor
    at: int  # which operand the weights are, 0 or 1
    into: bool = False  # whether the result is written into a tensor of the model's

    @property
    def folded(self) -> bool:
        """Whether heads were folded into the batch between softmax and value."""
        now, then = self.weights, self.softmax.scores
        if not now.ndim == len(self.order) == then.ndim - 1 == 3:
            return False
        return self.order[0] == 0 and now.shape[self.order.index(1)] == then.shape[-2]

    @property
    def order(self) -> tuple[int, ...]:
        """Which axis of the softmax each axis of the weights is; folded heads are one axis."""
        return self.origin.order or tuple(range(self.weights.ndim))


@dataclass(frozen=True)
class Axes:
    """The order of the axes of weights, values and context in one product."""

    softmax: tuple[int, ...]  # the permutation of scores and weights to (lead..., query, source)
    weights: tuple[int, ...]  # the same of the weights as the product takes them
    context: tuple[int, ...]  # the permutation to (lead..., query, value_dim)
    value: Tensor  # already (lead or 1..., source, value_dim)


def axes_of(product: ValueProduct, layout: AxisLayout | None) -> Axes | str:
    """Find the axes, or the reason why the product cannot be read as attention."""
    if not product.folded and not _shape_unchanged(product):
        return "its weights were reshaped between softmax and value"
    axes = _einsum_axes(product) if product.func is torch.einsum else _matmul_axes(product)
    if isinstance(axes, Axes) and not _broadcasts(axes, product.weights):
        return "its weights are multiplied by a value of other axes"
    if isinstance(axes, Axes) and layout is not None and _misread(product, axes, layout):
        return f"its einsum {product.args[0]!r} does not sum values by weights"
    return axes


def _misread(product: ValueProduct, axes: Axes, layout: AxisLayout) -> bool:
    """Whether an einsum mixes the queries, each with its own values, instead of the samples."""
    parts = parted([layout.axes[at] for at in axes.weights])
    return product.func is torch.einsum and misread(*parts)


def _shape_unchanged(product: ValueProduct) -> bool:
    """Whether weights have the shape from the softmax, except for sinks that were cut off."""
    found, then = product.softmax, product.softmax.weights.shape
    if product.weights.ndim != len(then) or len(product.order) != len(then):
        return False
    now = dict(zip(product.order, product.weights.shape, strict=True))
    rest = all(now[axis] == size for axis, size in enumerate(then) if axis != found.dim)
    return rest and now[found.dim] <= then[found.dim]


def _broadcasts(axes: Axes, weights: Tensor) -> bool:
    """Whether the value has the axes before (source, value_dim) that the weights have."""
    lead = [weights.shape[axis] for axis in axes.weights[:-2]]
    given = axes.value.shape[:-2]
    pairs = zip(reversed(given), reversed(lead), strict=False)
    return len(given) <= len(lead) and all(size in (1, other) for size, other in pairs)


def _sums_sources(product: ValueProduct, axis: int) -> bool:
    """Whether an axis of the weights is the one that the softmax ran over."""
    merged = product.softmax.scores.ndim - product.weights.ndim
    return product.order[axis] + merged == product.softmax.dim


def _matmul_axes(product: ValueProduct) -> Axes | str:
    weights, value, at = product.weights, product.value, product.at
    if weights.ndim < 2 or value.ndim < 2:
        return "its weights are multiplied by a vector"
    if not _sums_sources(product, -1 if at == 0 else -2):
        dim = product.softmax.dim
        return f"its softmax runs over axis {dim}, and its product with the value sums another one"
    same, axes = list(range(weights.ndim)), list(range(product.out.ndim))
    if at == 1:
        value = value.mT
        for some in (same, axes):
            some[-2:] = some[:-3:-1]
    return _ordered(product, same, axes, value)


def _ordered(product: ValueProduct, weights: list[int], context: list[int], value: Tensor) -> Axes:
    softmax = tuple(product.order[axis] for axis in weights)
    return Axes(softmax, tuple(weights), tuple(context), value)


def _einsum_axes(product: ValueProduct) -> Axes | str:
    equation = product.args[0]
    if not isinstance(equation, str) or len(list(tensors(product.args[1:]))) != 2:
        return "its einsum does not have two operands"
    pair = [product.weights, product.value]
    letters = read_equation(equation, pair if product.at == 0 else pair[::-1], product.at)
    if isinstance(letters, Letters) and not _sums_sources(
        product, letters.ours.index(letters.source)
    ):
        letters = f"sums over {letters.source!r}, and its softmax runs over another axis"
    if isinstance(letters, str):
        return f"its einsum {equation!r} {letters}"
    weights = [letters.ours.index(x) for x in (*letters.lead, letters.query, letters.source)]
    context = [letters.result.index(x) for x in (*letters.lead, letters.query, letters.width)]
    return _ordered(product, weights, context, _permuted(product.value, letters))


def _permuted(value: Tensor, letters: Letters) -> Tensor:
    """Permute a value to (lead or 1..., source, value_dim)."""
    order = [x for x in (*letters.lead, letters.source, letters.width) if x in letters.theirs]
    value = value.permute([letters.theirs.index(x) for x in order])
    for axis, x in enumerate(letters.lead):
        if x not in letters.theirs:
            value = value.unsqueeze(axis)
    return value
