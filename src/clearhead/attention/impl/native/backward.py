"""The gradients of a call by the compiled kernel: of query, key, value, bias and sinks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.impl.native import kernel
from clearhead.attention.impl.native.reading_grads import Changes, sink_weights
from clearhead.attention.problem import Problem

__all__ = ["backward", "sink_gradient"]


def backward(
    inputs: kernel.Inputs,
    out: Tensor,
    lse: Tensor,
    softmax: Tensor,
    grad: Tensor | None,
    changes: Changes | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, bias and sinks, those that are needed.

    `out`, `lse` and `softmax` are what the forward kept, `grad` is the gradient of the context and
    `changes` those of the readings.
    """
    given = torch.zeros_like(out) if grad is None else kernel.four(grad)
    given = given if given.dtype == out.dtype else given.to(out.dtype)
    sums = BiasSums(inputs.problem) if needs[3] else None
    found: list[Tensor | None] = list(_run(inputs, out, softmax, given, changes, sums))
    problem = inputs.problem
    for i, x in enumerate((problem.query, problem.key, problem.value)):
        found[i] = found[i].reshape(x.shape) if needs[i] else None  # type: ignore[union-attr]
    sinks = sink_gradient(problem, out, lse, given, changes) if needs[4] else None
    return *found, None if sums is None else sums.value(), sinks


def _run(
    inputs: kernel.Inputs,
    out: Tensor,
    softmax: Tensor,
    grad: Tensor,
    changes: Changes | None,
    sums: BiasSums | None,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs.query, inputs.key, inputs.value
    parts = inputs.parts()
    if changes is not None:
        parts = changes.split(parts)
    # The shares of several parts are added up, in fp32.
    wide = len(parts) > 1
    dq, dk, dv = _like(q, wide), _like(k, wide), _like(v, wide)
    total = (torch.zeros_like(dk), torch.zeros_like(dv)) if wide else (dk, dv)
    for part in parts:
        call = inputs.call(out, part if wide else None)
        call.set_softmax(softmax[0].data_ptr(), softmax[1].data_ptr())
        for extra in (changes, sums):
            if extra is not None:
                extra.tell(call, part)
        g, to = (x[:, :, part.start : part.stop] for x in (grad, dq)) if wide else (grad, dq)
        call.differentiate(
            g.data_ptr(), g.stride(), to.data_ptr(), to.stride(), dk.data_ptr(), dk.stride(),
            dv.data_ptr(), dv.stride(), wide, 0,
        )  # fmt: skip
        if wide:
            total[0].add_(dk)
            total[1].add_(dv)
    if wide:
        dq, dk, dv = (x.to(q.dtype) for x in (dq, *total))
    return dq, dk, dv


def _like(x: Tensor, wide: bool) -> Tensor:
    """A tensor of the shape, and where the kernel can fill them the strides, of an input."""
    made = torch.empty_like(x, dtype=torch.float32 if wide else x.dtype)
    return made if made.stride(3) == 1 or x.shape[3] == 1 else made.contiguous()


class BiasSums:
    """Where the kernel adds up the gradient of a bias, as large as the bias."""

    def __init__(self, problem: Problem):
        bias = problem.bias
        assert bias is not None
        self.bias, batch = bias, problem.query.shape[:-3]
        self.lifted = (1,) * (problem.query.ndim - bias.ndim) + tuple(bias.shape)
        # Batch axes of which only some broadcast have no stride as one: they are summed last.
        self.lead = batch if any(n > 1 for n in self.lifted[:-3]) else self.lifted[:-3]
        self.sums = torch.zeros(prod(self.lead), *self.lifted[-3:], dtype=torch.float32)

    def tell(self, call: Any, part: range) -> None:
        """Tell a kernel call on some of the queries."""
        steps = kernel.steps(self.sums)
        call.set_bias_grad(self.sums.data_ptr() + 4 * part.start * steps[2], steps)

    def value(self) -> Tensor:
        """The gradient, in the shape and dtype of the bias."""
        whole = self.sums.reshape(*self.lead, *self.lifted[-3:]).sum_to_size(self.lifted)
        return whole.reshape(self.bias.shape).to(self.bias.dtype)


def sink_gradient(
    problem: Problem, out: Tensor, lse: Tensor, grad: Tensor, changes: Changes | None
) -> Tensor:
    """A sink takes weight from all sources of its rows, and brings no value."""
    delta = (out.float() * grad.float()).sum(-1)
    if changes is not None:
        delta = delta + changes.terms
    assert problem.sinks is not None
    return -(sink_weights(problem, lse) * delta).sum((0, 2)).to(problem.sinks.dtype)
