"""The autograd function of a call over ranks: context, log-sum-exp and readings, and gradients.

Both directions are walks that all ranks run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from clearhead.attention import Problem
from clearhead.distributed.sequence import parts, ring
from clearhead.readings import LogSumExp, Reading

__all__ = ["over_ranks"]


def over_ranks(call: ring.Call, read: tuple[Reading, ...]) -> tuple[Tensor, list[Any]]:
    """Return the context of this rank's queries, and the values of the readings."""
    others = tuple(reading for reading in read if type(reading) is not LogSumExp)
    p, trees = call.problem, []
    context, lse, *flat = _Ring.apply(call, others, trees, p.query, p.key, p.value, p.bias, p.sinks)  # type: ignore[misc]
    found = dict(zip(others, pytree.tree_unflatten(flat, trees[0]), strict=True))
    return context, [found.get(reading, lse) for reading in read]


class _Ring(torch.autograd.Function):
    """One walk forward, and one more for readings; the backward recomputes each part."""

    @staticmethod
    def forward(ctx: Any, call: ring.Call, read: tuple[Reading, ...], trees: list, *inputs: Any):
        context, lse = ring.forward(call)
        rounded = lse.to(call.problem.dtype)
        merged = parts.merged(call, read, rounded) if read else []
        values = parts.finished(call, read, merged)
        flat, tree = pytree.tree_flatten(values)
        trees.append(tree)
        ctx.call, ctx.read, ctx.tree = replace(call, problem=_bare(call.problem)), read, tree
        # Aliases: an output kept on ctx would keep itself alive.
        ctx.parts = pytree.tree_map_only(Tensor, Tensor.detach, merged)
        ctx.save_for_backward(*inputs, context, lse)
        ctx.set_materialize_grads(False)
        flat = [x.view_as(x) for x in flat]
        named = zip(read, pytree.tree_unflatten(flat, tree), strict=True)
        ctx.mark_non_differentiable(*(x for r, value in named for x in r.constants(value)))
        return context, rounded, *flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, grad_lse: Any, *flat: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, context, lse = ctx.saved_tensors
        call = replace(ctx.call, problem=_filled(ctx.call.problem, inputs))
        more: Sequence[Any] = [None] * 3
        if ctx.read:
            given = pytree.tree_unflatten(list(flat), ctx.tree)
            *more, from_lse = parts.gradients(call, ctx.read, ctx.parts, lse, given)
            grad_lse = from_lse if grad_lse is None else grad_lse + from_lse
        found = ring.backward(call, (context, lse), grad, grad_lse)
        for i, x in zip((0, 1, 3), more, strict=True):
            known = found[i]
            found[i] = x if known is None else known if x is None else known + x
        return (
            None,
            None,
            None,
            *(
                None if x is None else x.to(like.dtype)
                for x, like in zip(found, inputs, strict=True)
            ),
        )


def _bare(problem: Problem) -> Any:
    return _filled(problem, (None,) * 5)


def _filled(problem: Problem, tensors: Any) -> Problem:
    query, key, value, bias, sinks = tensors
    return replace(problem, query=query, key=key, value=value, bias=bias, sinks=sinks)
