"""The backward pass of a call by the compiled kernel: from the context's and readings' gradients.

It computes the gradients of query, key, value, bias and sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.impl.native.base import Grad
from clearhead.attention.impl.native.call import Inputs, broadcast_strides, readable
from clearhead.attention.impl.native.readings import KINDS, sink_weights
from clearhead.attention.problem import Problem
from clearhead.readings import Reading

__all__ = ["ReadingGrads", "backward", "sink_gradient"]


class ReadingGrads:
    """What the gradients of readings add to the gradients of the weights."""

    def __init__(self, inputs: Inputs, lse: Tensor):
        self.inputs, self.lse = inputs, lse
        # sum_k p_ik x_ik of each row without the context's; the kernel adds what it finds itself.
        self.terms = torch.zeros(inputs.shape, dtype=torch.float32)
        self.kinds: dict[type[Grad], Grad] = {}

    def add(self, reading: Reading, value: Any, grad: Any) -> None:
        """Add the gradient of one reading; `value` may be None where the kind does not need it."""
        kind = KINDS[type(reading)].grad
        assert kind is not None
        if kind not in self.kinds:
            self.kinds[kind] = kind(self.inputs, self.lse, self.terms)
        self.kinds[kind].add(reading, value, grad)

    def split(self, parts: list[range]) -> list[range]:
        """Parts of few enough queries for every kind."""
        for kind in self.kinds.values():
            parts = kind.split(parts)
        return parts

    def bind(self, call: Any, part: range) -> None:
        """Set the gradients in a kernel call on some of the queries."""
        call.set_row_terms(self.terms.data_ptr())
        for kind in self.kinds.values():
            kind.bind(call, part, self.kinds)


def backward(
    inputs: Inputs,
    saved: tuple[Tensor, Tensor, Tensor],
    grad: Tensor | None,
    reading_grads: ReadingGrads | None,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of query, key, value, bias and sinks, those that are needed.

    `saved` are the context, log-sum-exp and softmax rows of the forward, `grad` is the gradient of
    the context and `reading_grads` those of the readings.
    """
    context, lse, softmax = saved
    out = readable(context)
    given = torch.zeros_like(out) if grad is None else readable(grad)
    given = given if given.dtype == out.dtype else given.to(out.dtype)
    sums = BiasSums(inputs.problem) if needs[3] else None
    found: list[Tensor | None] = list(_run(inputs, out, softmax, given, reading_grads, sums))
    problem = inputs.problem
    for i, x in enumerate((problem.query, problem.key, problem.value)):
        found[i] = found[i].reshape(x.shape) if needs[i] else None  # type: ignore[union-attr]
    sinks = sink_gradient(problem, out, lse, given, reading_grads) if needs[4] else None
    return [*found, None if sums is None else sums.value(), sinks]


def _run(
    inputs: Inputs,
    out: Tensor,
    softmax: Tensor,
    grad: Tensor,
    reading_grads: ReadingGrads | None,
    sums: BiasSums | None,
) -> tuple[Tensor, Tensor, Tensor]:
    parts = inputs.parts()
    if reading_grads is not None:
        parts = reading_grads.split(parts)
    # The gradients of several parts are added up in fp32.
    wide = len(parts) > 1
    dq, dk, dv = (_like(x, wide) for x in (inputs.query, inputs.key, inputs.value))
    total = (torch.zeros_like(dk), torch.zeros_like(dv)) if wide else (dk, dv)
    for part in parts:
        call = inputs.call(out, part if wide else None)
        call.set_softmax(softmax[0].data_ptr(), softmax[1].data_ptr())
        for extra in (reading_grads, sums):
            if extra is not None:
                extra.bind(call, part)
        g, to = (x[:, :, part.start : part.stop] for x in (grad, dq)) if wide else (grad, dq)
        call.differentiate(
            g.data_ptr(), g.stride(), to.data_ptr(), to.stride(), dk.data_ptr(), dk.stride(),
            dv.data_ptr(), dv.stride(), wide, 0,
        )  # fmt: skip
        if wide:
            total[0].add_(dk)
            total[1].add_(dv)
    if wide:
        dq, dk, dv = (x.to(inputs.query.dtype) for x in (dq, *total))
    return dq, dk, dv


def _like(x: Tensor, wide: bool) -> Tensor:
    """A tensor of an input's shape, and of its strides where the kernel can fill those."""
    made = torch.empty_like(x, dtype=torch.float32 if wide else x.dtype)
    return made if made.stride(3) == 1 or x.shape[3] == 1 else made.contiguous()


class BiasSums:
    """Where the kernel accumulates the gradient of a bias, as large as the bias."""

    def __init__(self, problem: Problem):
        bias = problem.bias
        assert bias is not None
        self.bias, batch = bias, problem.query.shape[:-3]
        self.lifted = (1,) * (problem.query.ndim - bias.ndim) + tuple(bias.shape)
        # Batch axes of which only some broadcast have no common stride: they are summed last.
        self.lead = batch if any(n > 1 for n in self.lifted[:-3]) else self.lifted[:-3]
        self.sums = torch.zeros(prod(self.lead), *self.lifted[-3:], dtype=torch.float32)

    def bind(self, call: Any, part: range) -> None:
        """Set the sums in a kernel call on some of the queries."""
        strides = broadcast_strides(self.sums)
        call.set_bias_grad(self.sums.data_ptr() + 4 * part.start * strides[2], strides)

    def value(self) -> Tensor:
        """The gradient, in the shape and dtype of the bias."""
        whole = self.sums.reshape(*self.lead, *self.lifted[-3:]).sum_to_size(self.lifted)
        return whole.reshape(self.bias.shape).to(self.bias.dtype)


def sink_gradient(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    reading_grads: ReadingGrads | None,
) -> Tensor:
    """The gradient of the sink logits: a sink takes weight from all sources and has no value."""
    delta = (out.float() * grad.float()).sum(-1)
    if reading_grads is not None:
        delta = delta + reading_grads.terms
    assert problem.sinks is not None
    return -(sink_weights(problem, lse) * delta).sum((0, 2)).to(problem.sinks.dtype)
