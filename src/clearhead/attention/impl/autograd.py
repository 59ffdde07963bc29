"""What hand-written backwards share: the tensors of a problem, and torch.autograd.grad for some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.problem import Problem

__all__ = ["bare", "filled", "pull", "tensors_of", "wants_gradient", "wrapped"]

FIELDS = ("query", "key", "value", "bias", "sinks")


def tensors_of(problem: Problem) -> tuple[Any, ...]:
    """What a gradient may be wanted of: query, key, value, and bias and sinks or None."""
    return problem.query, problem.key, problem.value, problem.bias, problem.sinks


def wants_gradient(problem: Problem) -> bool:
    """Whether autograd is on and some tensor of the problem needs a gradient."""
    if not torch.is_grad_enabled():
        return False
    if problem.query.requires_grad or problem.key.requires_grad or problem.value.requires_grad:
        return True
    return any(x is not None and x.requires_grad for x in (problem.bias, problem.sinks))


def wrapped(gradients: Sequence[Any]) -> bool:
    """Whether only plain operations can take these gradients on, which are more than numbers.

    As where one stands for several: torch.vmap, `is_grads_batched`, jacobian's `vectorize`.
    """
    ask: Any = torch._C._functorch  # pyright: ignore
    kinds = ask.is_legacy_batchedtensor, ask.is_functorch_wrapped_tensor
    return any(x is not None and any(kind(x) for kind in kinds) for x in gradients)


def bare(problem: Problem) -> Problem:
    """The problem without its tensors, as a backward may keep it."""
    return filled(problem, (None,) * len(FIELDS))


def filled(problem: Problem, tensors: Sequence[Any]) -> Problem:
    """The problem with these tensors in their places."""
    query, key, value, bias, sinks = tensors
    # A third of the time that dataclasses.replace takes.
    return Problem(
        query, key, value, problem.mask, problem.scale, bias, problem.softcap, sinks,
        problem.dropout, problem.seed,
    )  # fmt: skip


def pull(
    outputs: Sequence[Any], gradients: Any, inputs: Sequence[Any], needs: Any, create_graph: bool
) -> list[Tensor | None]:
    """torch.autograd.grad for the inputs that need one; None for the others."""
    given = zip(outputs, gradients, strict=True)
    pairs = [
        (x, g) for x, g in given if g is not None and isinstance(x, Tensor) and x.requires_grad
    ]
    wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
    if not pairs or not wanted:
        return [None] * len(inputs)
    ends, starts = zip(*pairs, strict=True)
    found = iter(
        torch.autograd.grad(ends, wanted, starts, create_graph=create_graph, allow_unused=True)
    )
    return [next(found) if need else None for need in needs]
