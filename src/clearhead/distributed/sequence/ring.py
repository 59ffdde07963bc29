"""The context and the log-sum-exp of a call over ranks, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.attention import Problem, attend_part, part_gradient
from clearhead.distributed.link import Link
from clearhead.distributed.sequence.plan import Plan, SourcePiece, Task
from clearhead.distributed.sequence.walk import Field, Walk, Work

__all__ = ["Call", "backward", "forward"]

INF = float("inf")
# Parts are merged in float64, so many numbers at a time.
ELEMENTS = 1 << 17
# A larger context of a part is computed in up to so many strips of rows.
STRIPS = 8


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
        heads = self.plan.shares.query_heads(task.heads)
        sizes = (x.stop - x.start for x in (heads, task.rows, task.columns))
        for axis, start, size in zip((-3, -2, -1), (head, query, source), sizes, strict=True):
            if bias.ndim >= -axis and bias.shape[axis] != 1:
                bias = bias.narrow(axis, start, size)
        return bias


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return the context and the log-sum-exp, in float64, of this rank's queries."""
    work = _Forward(call)
    Walk(call.link, call.plan, work, call.problem.mask).run()
    context, lse = work.sums
    return context.to(call.problem.query.dtype), lse.squeeze(-1)


class _Forward(Work):
    """The context of rows, from parts that hold different sources."""

    def __init__(self, call: Call):
        problem = call.problem
        self.call, self.query, self.source = call, [problem.query], [problem.key, problem.value]
        width = problem.value.shape[-1]
        self.query_fields = [Field(width, problem.query.dtype), Field(1, torch.float64)]
        self.sums = self.begin(self.query)
        if problem.sinks is not None:
            self.sums[1].copy_(problem.sinks.double()[:, None, None].expand_as(self.sums[1]))

    def begin(self, rows: Sequence[Tensor]) -> list[Tensor]:
        problem, (query,) = self.call.problem, rows
        width = problem.value.shape[-1]
        context = query.new_zeros(*query.shape[:-1], width, dtype=problem.dtype)
        return [context, query.new_full((*query.shape[:-1], 1), -INF, dtype=torch.float64)]

    def compute(
        self, task: Task, rows: list[Tensor], sources: list[Tensor], sums: list[Tensor]
    ) -> Sequence[Tensor]:
        count = task.rows.stop - task.rows.start
        step = max(-(-count // STRIPS), ELEMENTS // max(sums[0][..., 0, :].numel(), 1), 1)
        for at in range(0, count, step):
            cut = slice(at, min(at + step, count))
            first = task.rows.start
            part = task._replace(rows=slice(first + cut.start, first + cut.stop))
            query = rows[0][..., cut, :]
            context, lse = attend_part(self.call.part(part, query, *sources))
            _merge([x[..., cut, :] for x in sums], context, lse.unsqueeze(-1))
        return ()

    def take_query(self, heads: slice, rows: slice, found: Sequence[Tensor]) -> None:
        _merge([x[..., heads, rows, :] for x in self.sums], *found)


def _merge(sums: Sequence[Tensor], context: Tensor, lse: Tensor) -> None:
    """Add a part to sums: each side counts by its share of the sum of exponentials."""
    whole, total = sums
    both = torch.logaddexp(total, lse)
    of_whole, of_part = share(total, both), share(lse, both)
    total.copy_(both)
    step = max(1, ELEMENTS // max(whole.shape[:-2].numel() * whole.shape[-1], 1))
    for at in range(0, whole.shape[-2], step):
        rows = slice(at, at + step)
        part = context[..., rows, :] * of_part[..., rows, :]
        part += whole[..., rows, :] * of_whole[..., rows, :]
        whole[..., rows, :] = part


def share(lse: Tensor, whole: Tensor) -> Tensor:
    """The share of a part in its rows, from the log-sum-exp of both; 0 in an empty row."""
    empty = lse == -INF
    return torch.where(empty, 0.0, torch.where(empty, 0.0, lse - whole).exp())


def backward(
    call: Call, saved: Sequence[Tensor], grad: Tensor | None, grad_lse: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of query, key, value, bias and sinks, in the dtype of computation.

    `saved` are the context and its log-sum-exp; the gradients given are those of the two.
    """
    context, lse = saved
    grad = torch.zeros_like(context) if grad is None else grad
    work = _Backward(call, context, lse, grad, grad_lse)
    Walk(call.link, call.plan, work, call.problem.mask).run()
    return [*work.sums, work.key, work.value, work.bias, work.sinks()]


class _Backward(Work):
    """The gradients of one rank's inputs, from those of its context and log-sum-exp."""

    def __init__(self, call: Call, context: Tensor, lse: Tensor, grad: Tensor, grad_lse: Any):
        self.call, problem, dtype = call, call.problem, call.problem.dtype
        self.lse = lse.unsqueeze(-1)
        # The gradient of the log-sum-exp, and what every part of a row subtracts.
        self.terms = -(grad.to(dtype) * context.to(dtype)).sum(-1, keepdim=True)
        if grad_lse is not None:
            self.terms += grad_lse.unsqueeze(-1)
        self.query = [problem.query, grad, self.lse, self.terms]
        self.source = [problem.key, problem.value]
        self.query_fields = [Field.of(problem.query)]
        self.source_fields = [Field.of(x) for x in self.source]
        self.sums = self.begin([problem.query])
        self.key, self.value = (torch.zeros_like(x, dtype=dtype) for x in self.source)
        bias, self.bias = problem.bias, None
        if bias is not None and bias.requires_grad:
            self.bias = torch.zeros_like(bias, dtype=dtype)

    def begin(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(rows[0], dtype=self.call.problem.dtype)]

    def compute(
        self, task: Task, rows: list[Tensor], sources: list[Tensor], sums: list[Tensor]
    ) -> Sequence[Tensor]:
        query, grad, lse, terms = rows
        part = self.call.part(task, query, *sources)
        needs = (True, True, True, self.bias is not None, False)
        found: Any = part_gradient(part, lse[..., 0], grad, terms[..., 0], needs)
        dq, dk, dv, bias, _ = found
        sums[0] += dq
        if self.bias is not None and bias is not None:
            self.call.cut(self.bias, task).add_(bias)
        return dk, dv

    def take_query(self, heads: slice, rows: slice, found: Sequence[Tensor]) -> None:
        self.sums[0][..., heads, rows, :] += found[0]

    def take_source(self, piece: SourcePiece, found: Sequence[Tensor]) -> None:
        for total, x in zip((self.key, self.value), found, strict=True):
            total[..., piece.heads, piece.columns, :] += x

    def sinks(self) -> Tensor | None:
        """The gradient of the sink logits: this rank's part."""
        sinks = self.call.problem.sinks
        if sinks is None or not sinks.requires_grad:
            return None
        weights = share(sinks.to(self.lse)[:, None, None].expand_as(self.lse), self.lse)
        return (weights * self.terms).flatten(0, -4).sum((0, 2, 3))
