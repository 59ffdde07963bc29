"""The context and the log-sum-exp of a call over ranks, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.attention import Problem, attend_part, part_gradient
from clearhead.distributed.link import Link
from clearhead.distributed.plan import Plan, Task
from clearhead.distributed.walk import Field, Walk

__all__ = ["Call", "over_ranks"]

INF = float("inf")


@dataclass(frozen=True)
class Call:
    """A call as one rank sees it: the problem has this rank's tensors and the whole mask."""

    link: Link
    problem: Problem
    plan: Plan

    def part(self, task: Task, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        """The problem of one task."""
        shares, bias = self.plan.shares, self.problem.bias
        return replace(
            self.problem, query=query, key=key, value=value, sinks=None,
            mask=shares.mask(self.problem.mask, task),
            bias=None if bias is None else self.cut(bias, task), corner=shares.corner(task),
        )  # fmt: skip

    def cut(self, bias: Tensor, task: Task) -> Tensor:
        """The bias of one task, a view; axes that broadcast stay as they are."""
        head, query, source, _ = self.plan.shares.corner(task)
        heads = self.plan.shares.query_heads(task)
        sizes = (heads.stop - heads.start, task.rows.stop - task.rows.start,
                 self.plan.shares.sources[task.source])  # fmt: skip
        for axis, start, size in zip((-3, -2, -1), (head, query, source), sizes, strict=True):
            if bias.ndim >= -axis and bias.shape[axis] != 1:
                bias = bias.narrow(axis, start, size)
        return bias


def over_ranks(call: Call) -> tuple[Tensor, Tensor]:
    """Return the context and the log-sum-exp of this rank's queries."""
    p = call.problem
    return _Ring.apply(call, p.query, p.key, p.value, p.bias, p.sinks)  # type: ignore[return-value]


class _Merged:
    """The context of this rank's rows, from parts that hold different sources."""

    def __init__(self, problem: Problem):
        query, width = problem.query, problem.value.shape[-1]
        self.context = query.new_zeros(*query.shape[:-1], width, dtype=problem.dtype)
        self.lse = query.new_full((*query.shape[:-1], 1), -INF, dtype=torch.float64)
        if problem.sinks is not None:
            self.lse = problem.sinks.double()[:, None, None].expand_as(self.lse).clone()

    def add(self, heads: slice, rows: slice, context: Tensor, lse: Tensor) -> None:
        """Add a part: each side counts by its share of the sum of exponentials."""
        whole, sums = self.context[..., heads, rows, :], self.lse[..., heads, rows, :]
        both = torch.logaddexp(sums, lse)
        whole.copy_(whole * share(sums, both) + context * share(lse, both))
        sums.copy_(both)


def share(lse: Tensor, whole: Tensor) -> Tensor:
    """The share of a part in its rows, from the log-sum-exp of both; 0 in an empty row."""
    empty = lse == -INF
    return torch.where(empty, 0.0, torch.where(empty, 0.0, lse - whole).exp())


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    problem, merged = call.problem, _Merged(call.problem)
    shares = call.plan.shares

    def compute(task: Task, rows: list[Tensor], sources: list[Tensor]) -> Any:
        context, lse = attend_part(call.part(task, *rows, *sources))
        return (context, lse.unsqueeze(-1)), ()

    def take(task: Task, found: Sequence[Tensor]) -> None:
        merged.add(shares.query_heads(task), task.rows, *found)

    fields = [Field(problem.value.shape[-1], problem.query.dtype), Field(1, torch.float64)]
    Walk(
        call.link, call.plan, [problem.query], [problem.key, problem.value], fields, [],
        compute, take, lambda task, found: None,
    ).run()  # fmt: skip
    return merged.context.to(problem.query.dtype), merged.lse.squeeze(-1)


class _Ring(torch.autograd.Function):
    """One walk forward; the backward walks once more and recomputes each part."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Any):
        context, lse = _forward(call)
        ctx.call = replace(call, problem=_bare(call.problem))
        ctx.save_for_backward(*inputs, context, lse)
        ctx.set_materialize_grads(False)
        return context, lse.to(call.problem.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, grad_lse: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, context, lse = ctx.saved_tensors
        call = replace(ctx.call, problem=_filled(ctx.call.problem, inputs))
        grad = torch.zeros_like(context) if grad is None else grad
        return None, *_Backward(call, context, lse, grad, grad_lse).gradients(ctx.needs_input_grad)


def _bare(problem: Problem) -> Any:
    return _filled(problem, (None,) * 5)


def _filled(problem: Problem, tensors: Any) -> Problem:
    query, key, value, bias, sinks = tensors
    return replace(problem, query=query, key=key, value=value, bias=bias, sinks=sinks)


class _Backward:
    """The gradients of one rank's inputs, from those of its context and log-sum-exp."""

    def __init__(self, call: Call, context: Tensor, lse: Tensor, grad: Tensor, grad_lse: Any):
        self.call, self.problem, dtype = call, call.problem, call.problem.dtype
        problem = self.problem
        self.lse, self.grad = lse.unsqueeze(-1), grad
        # The gradient of the log-sum-exp, and what every part of a row subtracts.
        self.terms = -(grad.to(dtype) * context.to(dtype)).sum(-1, keepdim=True)
        if grad_lse is not None:
            self.terms += grad_lse.unsqueeze(-1)
        self.query, self.key, self.value = (
            torch.zeros_like(x, dtype=dtype) for x in (problem.query, problem.key, problem.value)
        )
        bias = problem.bias
        self.bias = None
        if bias is not None and bias.requires_grad:
            self.bias = torch.zeros_like(bias, dtype=dtype)

    def gradients(self, needs: Sequence[bool]) -> list[Tensor | None]:
        """Walk the ring, and return the gradients of query, key, value, bias and sinks."""
        p, dtype = self.problem, self.problem.query.dtype
        self._walk()
        sinks = None
        if p.sinks is not None and needs[5]:
            weights = share(p.sinks.to(self.lse)[:, None, None].expand_as(self.lse), self.lse)
            sinks = (weights * self.terms).flatten(0, -4).sum((0, 2, 3)).to(p.sinks.dtype)
        found = [self.query.to(dtype), self.key.to(dtype), self.value.to(dtype)]
        bias = None if self.bias is None else self.bias.to(p.bias.dtype)  # type: ignore[union-attr]
        return [*found, bias, sinks]

    def _walk(self) -> None:
        p = self.problem
        Walk(
            self.call.link, self.call.plan, [p.query, self.grad, self.lse, self.terms],
            [p.key, p.value], [Field.of(p.query)], [Field.of(p.key), Field.of(p.value)],
            self._compute, self._take_query, self._take_source,
        ).run()  # fmt: skip

    def _compute(self, task: Task, rows: list[Tensor], sources: list[Tensor]) -> Any:
        query, grad, lse, terms = rows
        part = self.call.part(task, query, *sources)
        needs = (True, True, True, self.bias is not None, False)
        dq, dk, dv, bias, _ = part_gradient(part, lse[..., 0], grad, terms[..., 0], needs)
        if self.bias is not None and bias is not None:
            self.call.cut(self.bias, task).add_(bias)
        return (dq,), (dk, dv)

    def _take_query(self, task: Task, found: Sequence[Tensor]) -> None:
        self.query[..., self.call.plan.shares.query_heads(task), task.rows, :] += found[0]

    def _take_source(self, task: Task, found: Sequence[Tensor]) -> None:
        for total, x in zip((self.key, self.value), found, strict=True):
            total[..., task.heads, :, :] += x
