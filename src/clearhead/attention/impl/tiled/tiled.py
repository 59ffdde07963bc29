"""Attention over strips of rows: torch operations on any device, memory linear in the positions.

Plain calls on a CPU are one pass over strips that stay in the cache (`stream`), with torch's own
fused kernel for the context in half precision (`fused`); all other calls evaluate the equation
strip by strip (`strips`). This choice does not depend on `read`, so that looking changes nothing.
The backward is torch's fused one where that agrees, or recomputes each strip under autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from clearhead._core import active_transforms
from clearhead.attention.impl.autograd import (
    bare,
    check_storages,
    constants,
    filled,
    masks_of,
    part_grad,
    pull,
    tensors_of,
    wants_gradient,
    wrapped,
)
from clearhead.attention.impl.tiled import fused, stream
from clearhead.attention.impl.tiled.strips import (
    Piece,
    height_for,
    mix,
    plan,
    take,
    take_bias,
    weigh,
)
from clearhead.attention.problem import Corner, Problem
from clearhead.readings import Reading, Strip

# Elements in a strip of all heads and samples, and the fewest rows that still make a fair matmul.
ELEMENTS, ROWS = 1 << 21, 32


class Tiled:
    """The implementation in strips. It serves plain tensors on any device."""

    name = "tiled"

    def state(self) -> str:
        """Return "ready": it needs nothing but torch."""
        return "ready"

    def unsupported_reasons(self, problem: Problem, read: tuple[Reading, ...]) -> list[str]:
        """Return why the call needs the reference: active transforms, inputs or readings."""
        reasons = active_transforms()
        inputs = tensors_of(problem)
        if any(type(x) not in (Tensor, torch.nn.Parameter) for x in inputs if x is not None):
            reasons.append("an input is a tensor subclass")
        if problem.query.is_meta:
            reasons.append("meta tensors hold nothing to compute with")
        if wants_gradient(problem) and not all(reading.splits_grad for reading in read):
            reasons.append("a reading does not split its gradient over strips")
        return reasons

    def attend(self, problem: Problem, read: tuple[Reading, ...]) -> tuple[Tensor, list[Any]]:
        """Return the context and the values of the readings."""
        if not wants_gradient(problem):
            context, _, parts = _forward(problem, read)
            return context, [r.finish(part) for r, part in zip(read, parts, strict=True)]
        trees: list[Any] = []
        context, *flat = _Recomputed.apply(problem, read, trees, *tensors_of(problem))  # type: ignore[misc]
        return context, pytree.tree_unflatten(flat, trees[0])

    def parts(self, problem: Problem, read: tuple[Reading, ...], lse: Tensor) -> list[Any]:
        """Return the part of each reading in a larger map, whose rows have this log-sum-exp."""
        parts: list[Any] = [None] * len(read)
        equation = _Equation(problem)
        for piece in equation.pieces():
            strip = _of_larger(problem, equation.weigh(piece)[0], lse[..., piece.rows])
            for i, reading in enumerate(read):
                part = reading.part(strip)
                parts[i] = part if parts[i] is None else reading.merge(parts[i], part)
        return parts

    def parts_gradient(
        self, problem: Problem, read: tuple[Reading, ...], lse: Tensor, grads: list[Any], first: int
    ) -> tuple[list[Tensor | None], int]:
        """The gradients of query, key, bias and log-sum-exp, from those of the readings' parts.

        The strips count from `first`; the number of the next one is returned too.
        """
        equation, inputs = _Equation(problem), tensors_of(problem)
        needs = (True, True, False, problem.bias is not None, False)
        sums = [
            torch.zeros(x.shape, dtype=problem.dtype, device=x.device) if need else None
            for x, need in zip(inputs, needs, strict=True)
        ]
        to_lse, pieces = torch.zeros_like(lse), equation.pieces()
        for index, piece in enumerate(pieces, first):
            cut = tuple(_leaf(x, need, problem.dtype)
                        for x, need in zip(equation.cut(piece), needs, strict=True))  # fmt: skip
            rows = lse[..., piece.rows].detach().requires_grad_()
            with torch.enable_grad():
                strip = _of_larger(problem, equation.weigh(piece, cut)[0], rows)
                outputs, gradients = _parts_and_grads(read, grads, strip, piece, index)
            *found, moved = pull(outputs, gradients, [*cut, rows], [*needs, True], False)
            _add(sums, piece, found)
            to_lse[..., piece.rows] += 0 if moved is None else moved
        return [sums[0], sums[1], sums[3], to_lse], first + len(pieces)

    def part_gradient(
        self, problem: Problem, lse: Tensor, grad: Tensor, terms: Tensor, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients of a part of a larger map; `lse` and `terms` are those of whole rows."""
        equation, inputs = _Equation(problem), tensors_of(problem)
        sums = [
            torch.zeros(x.shape, dtype=problem.dtype, device=x.device) if need else None
            for x, need in zip(inputs, needs, strict=True)
        ]
        for piece in equation.pieces():
            cut = tuple(_leaf(x, need, problem.dtype)
                        for x, need in zip(equation.cut(piece), needs, strict=True))  # fmt: skip
            with torch.enable_grad():
                strip, allowed = equation.weigh(piece, cut)
                weights = _weights_of(strip.scores.detach(), lse[..., piece.rows])
                weights.requires_grad_()
                mixed = equation.mix(piece, replace(strip, weights=weights), allowed, cut[2])
            outer = grad[..., piece.rows, :].to(problem.dtype)
            to_weights, to_value = pull(
                [mixed], [outer], [weights, cut[2]], [True, needs[2]], False
            )
            to_scores = weights.detach() * (to_weights + terms[..., piece.rows, None])  # type: ignore[operator]
            found = pull([strip.scores], [to_scores], cut, [*needs[:2], False, *needs[3:]], False)
            _add(sums, piece, [*found[:2], to_value, *found[3:]])
        return [None if x is None else x.to(y.dtype) for x, y in zip(sums, inputs, strict=True)]

    def readings_only(self, problem: Problem, read: tuple[Reading, ...]) -> list[Any]:
        """Return the values of the readings, without a gradient and without the context."""
        with torch.no_grad():
            _, _, parts = _forward(problem, read, mix=False)
            return [reading.finish(part) for reading, part in zip(read, parts, strict=True)]


def _forward(
    problem: Problem, read: tuple[Reading, ...], mix: bool = True, graph: bool = False
) -> tuple[Any, Tensor | None, list[Any]]:
    """Context, log-sum-exp where it is known, and the part of each reading."""
    if not stream.serves(problem):
        return _by_strips(problem, read, mix)
    by_torch = mix and fused.serves(problem)
    if by_torch and not (read or graph):
        return fused.attend(problem), None, []
    context, lse, parts = stream.attend(problem, read, mix and not by_torch)
    if by_torch:
        context = fused.attend(problem)
    missing = [i for i, part in enumerate(parts) if part is None]
    if missing:
        found = _by_strips(problem, tuple(read[i] for i in missing), mix=False)[2]
        for i, part in zip(missing, found, strict=True):
            parts[i] = part
    return context, lse, parts


def _by_strips(
    problem: Problem, read: tuple[Reading, ...], mix: bool
) -> tuple[Tensor, None, list[Any]]:
    query, value = problem.query, problem.value
    mixed = query.new_empty(*query.shape[:-1], value.shape[-1] if mix else 0)
    parts: list[Any] = [None] * len(read)
    equation = _Equation(problem)
    for piece in equation.pieces():
        strip, allowed = equation.weigh(piece)
        if mix:
            mixed[..., piece.rows, :] = equation.mix(piece, strip, allowed)
        for i, reading in enumerate(read):
            part = reading.part(strip)
            parts[i] = part if parts[i] is None else reading.merge(parts[i], part)
    return mixed, None, parts


class _Equation:
    """The inputs of a call in the dtype it is computed in, and the equation on its strips."""

    def __init__(self, problem: Problem):
        self.problem, dtype = problem, problem.dtype
        self.query, self.key = problem.query.to(dtype), problem.key.to(dtype)
        self.value, self.bias, self.sinks = problem.value.to(dtype), problem.bias, problem.sinks
        self.finite = _finite(self.query) and _finite(self.key)
        self.finite_value = _finite(self.value)

    def pieces(self, whole: bool = False) -> list[Piece]:
        """The strips; an empty map has one, so that readings have a part."""
        height = height_for(self.problem, ELEMENTS, ROWS)
        height = max(self.query.shape[-2], 1) if whole else height
        nothing = [Piece(slice(0, 0), slice(0, 0), slice(0, 0))]
        return plan(self.problem, height) or nothing

    def cut(self, piece: Piece) -> tuple[Any, ...]:
        """The piece's slices of query, key, value, bias and sinks."""
        bias = None if self.bias is None else take_bias(self.bias, piece)
        query = self.query[..., piece.rows, :]
        return query, *(take(x, piece.columns) for x in (self.key, self.value)), bias, self.sinks

    def weigh(self, piece: Piece, cut: tuple[Any, ...] | None = None) -> Any:
        query, key, _, bias, sinks = cut or self.cut(piece)
        return weigh(self.problem, piece, query, key, bias, sinks, self.finite)

    def mix(self, piece: Piece, strip: Strip, allowed: Any, value: Tensor | None = None) -> Tensor:
        value = take(self.value, piece.columns) if value is None else value
        return mix(self.problem, strip, value, allowed, self.finite_value)


def _of_larger(problem: Problem, strip: Strip, lse: Tensor) -> Strip:
    """A strip of a problem as one of the larger map, whose rows have this log-sum-exp."""
    _, query, source, whole = problem.corner or Corner(0, 0, 0, problem.sizes)
    return Strip.of(
        strip.scores, lse=lse, queries=strip.queries + query, sources=strip.sources + source,
        query=whole.query, source=whole.source,
    )  # fmt: skip


def _parts_and_grads(
    read: tuple[Reading, ...], grads: list[Any], strip: Strip, piece: Piece, index: int
) -> tuple[list[Any], list[Any]]:
    """The tensors of all readings' parts of a strip, and their gradients."""
    outputs, gradients = [], []
    for reading, grad in zip(read, grads, strict=True):
        outputs += pytree.tree_leaves(reading.part(strip))
        gradients += pytree.tree_leaves(reading.part_grad(grad, piece.rows, index))
    return outputs, gradients


def _weights_of(scores: Tensor, lse: Tensor) -> Tensor:
    """The weights of scores whose whole rows have this log-sum-exp, in float64."""
    rounded = lse.to(scores.dtype)
    factor = (rounded - lse).exp().masked_fill(lse == -torch.inf, 1).to(scores.dtype)
    return Strip.of(scores, lse=rounded).weights * factor.unsqueeze(-1)


def _finite(x: Tensor) -> bool:
    return bool(x.detach().isfinite().all())


class _Recomputed(torch.autograd.Function):
    """The forward without a graph; the backward recomputes strip after strip."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, read: tuple[Reading, ...], trees: list, *inputs: Any):
        context, lse, parts = _forward(problem, read, graph=True)
        values = [r.finish(part) for r, part in zip(read, parts, strict=True)]
        flat, tree = pytree.tree_flatten(values)
        trees.append(tree)
        ctx.problem, ctx.read, ctx.tree = bare(problem), read, tree
        # Aliases: an output kept on ctx would keep itself alive.
        ctx.parts = pytree.tree_map_only(Tensor, Tensor.detach, parts)
        ctx.save_for_backward(*inputs, context, lse, *masks_of(problem, read))
        ctx.set_materialize_grads(False)
        flat = [x.view_as(x) for x in flat]
        ctx.mark_non_differentiable(*constants(read, pytree.tree_unflatten(flat, tree)))
        return context, *flat

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        saved = ctx.saved_tensors
        problem, (context, lse) = filled(ctx.problem, saved[:5]), saved[5:7]
        check_storages(problem, context)
        outer, *flat = gradients
        needs = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled() or wrapped(gradients):
            found = _whole_gradient(problem, ctx.read, gradients, needs)
        elif fused.differentiates(problem, lse, gradients):
            found = (*fused.gradient(problem, context, lse, outer), None, None)
        else:
            given = pytree.tree_unflatten(flat, ctx.tree)
            grads = [part_grad(*each) for each in zip(ctx.read, ctx.parts, given, strict=True)]
            found = _strip_gradient(problem, ctx.read, grads, outer, needs)
        return None, None, None, *found


def _whole_gradient(
    problem: Problem, read: tuple[Reading, ...], gradients: tuple[Any, ...], needs: Any
) -> list[Tensor | None]:
    """The gradient as a differentiable function of inputs and gradients, in one strip."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # One tensor may be query, key and value at once: each alias has its own gradient.
        inputs = [None if x is None else x.view_as(x) for x in tensors_of(problem)]
        equation = _Equation(filled(problem, inputs))
        (piece,) = equation.pieces(whole=True)
        strip, allowed = equation.weigh(piece)
        values = [reading.finish(reading.part(strip)) for reading in read]
        context = equation.mix(piece, strip, allowed).to(problem.query.dtype)
        return pull([context, *pytree.tree_leaves(values)], gradients, inputs, needs, again)


def _strip_gradient(
    problem: Problem, read: tuple[Reading, ...], grads: list[Any], outer: Any, needs: Any
) -> list[Tensor | None]:
    """Gradients of the inputs, from those of the context and of the readings' merged parts."""
    equation, inputs = _Equation(problem), tensors_of(problem)
    sums = [
        torch.zeros(x.shape, dtype=problem.dtype, device=x.device) if need else None
        for x, need in zip(inputs, needs, strict=True)
    ]
    for index, piece in enumerate(equation.pieces()):
        cut = tuple(_leaf(x, need, problem.dtype)
                    for x, need in zip(equation.cut(piece), needs, strict=True))  # fmt: skip
        with torch.enable_grad():
            strip, allowed = equation.weigh(piece, cut)
            outputs, gradients = [], []
            if outer is not None:
                outputs.append(equation.mix(piece, strip, allowed, cut[2]))
                gradients.append(outer[..., piece.rows, :].to(problem.dtype))
            more = _parts_and_grads(read, grads, strip, piece, index)
            outputs, gradients = outputs + more[0], gradients + more[1]
        _add(sums, piece, pull(outputs, gradients, cut, needs, False))
    return [None if x is None else x.to(given.dtype) for x, given in zip(sums, inputs, strict=True)]


def _leaf(x: Tensor | None, needs_grad: bool, dtype: torch.dtype) -> Tensor | None:
    if x is None:
        return None
    x = x.detach().to(dtype)
    return x.requires_grad_() if needs_grad else x


def _add(sums: list[Tensor | None], piece: Piece, found: list[Tensor | None]) -> None:
    """Add a strip's gradients of query, key, value, bias and sinks to the sums."""
    for i, (total, x) in enumerate(zip(sums, found, strict=True)):
        if total is None or x is None:
            continue
        if i == 0:
            total[..., piece.rows, :] = x
        elif i == 4:
            total += x
        else:
            _add_columns(total, piece, x, bias=i == 3)


def _add_columns(total: Tensor, piece: Piece, x: Tensor, bias: bool) -> None:
    axis = -2
    if bias:
        if total.ndim >= 2 and total.shape[-2] != 1:
            total = total[..., piece.rows, :]
        if total.ndim < 1 or total.shape[-1] == 1:
            total += x
            return
        axis = -1
    if isinstance(piece.columns, Tensor):
        total.index_add_(axis, piece.columns, x)
    else:
        total.narrow(axis, piece.columns.start, piece.width).add_(x)
