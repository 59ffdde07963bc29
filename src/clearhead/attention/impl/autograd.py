"""What handwritten backward passes share: a problem's tensors, and gradients of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from clearhead.attention.problem import Problem
from clearhead.readings import Reading

__all__ = [
    "bare",
    "check_storages",
    "constants",
    "filled",
    "masks_of",
    "part_grad",
    "pull",
    "tensors_of",
    "through",
    "wants_gradient",
    "wrapped",
]

FIELDS = ("query", "key", "value", "bias", "sinks")


def tensors_of(problem: Problem) -> tuple[Any, ...]:
    """The differentiable inputs: query, key, value, and bias and sinks or None."""
    return problem.query, problem.key, problem.value, problem.bias, problem.sinks


def wants_gradient(problem: Problem) -> bool:
    """Whether autograd is on and some tensor of the problem needs a gradient."""
    if not torch.is_grad_enabled():
        return False
    if problem.query.requires_grad or problem.key.requires_grad or problem.value.requires_grad:
        return True
    return any(x is not None and x.requires_grad for x in (problem.bias, problem.sinks))


def wrapped(gradients: Sequence[Any]) -> bool:
    """Whether a gradient is a wrapped tensor, which only plain torch operations accept.

    A batched gradient is one: torch.vmap, `is_grads_batched`, jacobian's `vectorize`.
    """
    functorch: Any = torch._C._functorch  # pyright: ignore
    kinds = functorch.is_legacy_batchedtensor, functorch.is_functorch_wrapped_tensor
    return any(x is not None and any(kind(x) for kind in kinds) for x in gradients)


def bare(problem: Problem) -> Problem:
    """The problem without its tensors, which an autograd context may keep."""
    return filled(problem, (None,) * len(FIELDS))


def masks_of(problem: Problem, read: Sequence[Reading]) -> list[Tensor]:
    """The caller's mask tensors that a backward pass reads again.

    Saved with the inputs, an edit in place makes the backward pass raise, as torch does. An
    inference tensor cannot be saved.
    """
    sources = [*read] if problem.mask is None else [problem.mask, *read]
    return [x for source in sources for x in source.tensors() if not x.is_inference()]


def filled(problem: Problem, tensors: Sequence[Any]) -> Problem:
    """The problem with these tensors as its query, key, value, bias and sinks."""
    query, key, value, bias, sinks = tensors
    # This takes a third of the time of dataclasses.replace.
    return Problem(
        query, key, value, problem.mask, problem.scale, bias, problem.softcap, sinks,
        problem.dropout, problem.seed, problem.corner,
    )  # fmt: skip


def check_storages(problem: Problem, context: Tensor) -> None:
    """Raise where a tensor that the backward pass reads has lost its memory since the call."""
    for name, x in zip((*FIELDS, "context"), (*tensors_of(problem), context), strict=True):
        if x is not None and x.numel() and not x.untyped_storage().nbytes():
            raise RuntimeError(
                f"attend: the storage of {name} was resized to 0 bytes after the call, and the "
                "backward pass reads it; restore it first, as FSDP does by gathering parameters"
            )


def constants(read: Sequence[Reading], values: Sequence[Any]) -> list[Tensor]:
    """List the tensors of the values that have no gradient."""
    return [x for r, value in zip(read, values, strict=True) for x in r.constants(value)]


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


def part_grad(reading: Reading, part: Any, given: Any) -> Any:
    """From the gradient of a reading's value to that of its merged part; None where none."""
    leaves, tree = pytree.tree_flatten(part)
    with torch.enable_grad():
        leaves = [x.requires_grad_() if _real(x) else x for x in leaves]
        value = reading.finish(pytree.tree_unflatten(leaves, tree))
    needs = [_real(x) for x in leaves]
    found = pull(pytree.tree_leaves(value), pytree.tree_leaves(given), leaves, needs, False)
    return pytree.tree_unflatten(found, tree)


def _real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def through(
    implementation: Any, problem: Problem, read: tuple[Reading, ...], gradients: Any, needs: Any
) -> list[Tensor | None]:
    """Gradients by an implementation that recomputes the call under autograd."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # One tensor may be query, key and value at once: each alias has its own gradient.
        aliases = [
            x.view_as(x) if x is not None and x.requires_grad else x for x in tensors_of(problem)
        ]
        context, values = implementation.attend(filled(problem, aliases), read)
        return pull([context, *pytree.tree_leaves(values)], gradients, aliases, needs, again)
