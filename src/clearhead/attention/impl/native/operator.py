"""The kernels of the operator `clearhead::attend` on a CPU, for traced calls."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.impl.autograd import filled, tensors_of, through
from clearhead.attention.impl.native import kernel
from clearhead.attention.impl.native.backward import ReadingGrads, backward
from clearhead.attention.impl.native.call import Inputs
from clearhead.attention.impl.native.forward import forward
from clearhead.attention.problem import Problem
from clearhead.readings import LogSumExp

__all__ = ["Operator"]

Saved = tuple[Tensor, Tensor, Tensor]


class Operator:
    """Forward and backward of the operator: the compiled kernel, or for huge numbers the fallback.

    `out_of_range` computes a call whose numbers are out of the kernel's range, as in eager calls.
    """

    def __init__(self, out_of_range: Callable[..., Any], fallback: Any):
        self.out_of_range, self.fallback = out_of_range, fallback

    def forward(self, problem: Problem) -> Saved:
        """Return the context, the log-sum-exp, and the softmax rows; NaN after a fallback."""
        try:
            context, results = forward(Inputs(problem), graph=True)
        except kernel.OutOfRange:
            context, (lse,) = self.out_of_range(problem, (LogSumExp(),))
            return context, lse, lse.new_full((2, *lse.shape), torch.nan)
        return context, results.lse, results.softmax  # type: ignore[union-attr,return-value]

    def backward(
        self, problem: Problem, saved: Saved, grad: Tensor, grad_lse: Tensor, needs: list[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of query, key, value, and of bias and sinks where needed."""
        context, lse, softmax = saved
        wanted = (True, True, True, *needs)
        if softmax.isnan().all():
            return self._by_fallback(problem, [grad, grad_lse], wanted)
        inputs = Inputs(problem)
        reading_grads = ReadingGrads(inputs, lse)
        reading_grads.add(LogSumExp(), None, grad_lse)
        return backward(inputs, (context, lse, softmax.contiguous()), grad, reading_grads, wanted)

    def _by_fallback(self, problem: Problem, gradients: list[Tensor], needs: Any) -> list[Any]:
        """Differentiate in a thread of its own: autograd is off within an operator."""
        leaves = [None if x is None else x.detach().requires_grad_() for x in tensors_of(problem)]

        def work() -> list[Any]:
            with torch.no_grad():
                call = filled(problem, leaves)
                return through(self.fallback, call, (LogSumExp(),), gradients, needs)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()
