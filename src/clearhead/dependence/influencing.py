"""influence(): how strongly an output depends on the input of each position."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core import type_error, value_error
from clearhead.dependence.proof.subject import (
    Inputs,
    embedding_of,
    read_inputs,
    rows_of,
    tensors_in,
)

__all__ = ["influence"]

HOW = ("jacobian", "swap")
# Outputs with more features than this are probed at random instead of one by one.
_EXACT = 64


def influence(
    model: nn.Module | Callable[..., Any],
    inputs: Any,
    *,
    position: int = -1,
    how: str = "jacobian",
    probes: int = 32,
    swaps: int = 4,
    seed: int = 0,
    output: Callable[[Any], Tensor] | None = None,
) -> Tensor:
    """Measure how strongly the output at a position depends on the input of every position.

    >>> import torch, clearhead as ch
    >>> model = ch.models.load()
    >>> tokens = model.vocabulary.encode("hell")[None]
    >>> ch.influence(model, tokens, position=1).shape
    torch.Size([1, 4])
    >>> ch.influence(model, tokens, position=1)[0, 2:]  # it reads nothing that comes after
    tensor([0., 0.])

    - `how`: "jacobian" is the Frobenius norm of the derivative of the output vector by the input
      vector of each position; token ids enter through their embedding. "swap" puts another token,
      or the vector of another position, into each position in turn, and takes the Euclidean norm
      of the change of the output, averaged over `swaps` draws.
    - `probes`: outputs of more than 64 features are not differentiated one by one: the squared norm
      is estimated from this many random projections (Hutchinson 1989), to about a tenth for 32.
    - `output`: picks the tensor with a position axis out of what the model returns; by default the
      first that has one.
    - `seed`: of the probes and swaps; torch's own random state is left alone.

    The answer is (batch, position). A model in training mode, with dropout, answers with its noise:
    call `model.eval()` first.
    """
    if how not in HOW:
        raise value_error("how", f"is one of {', '.join(HOW)}", got=repr(how))
    for name, number in (("probes", probes), ("swaps", swaps)):
        if not isinstance(number, int) or number < 1:
            raise value_error(name, "is 1 or more", got=number)
    given = read_inputs(inputs, axis=None, change=None)
    if not isinstance(position, int) or isinstance(position, bool):
        raise type_error("position", "is a number", got=repr(position))
    if not -given.positions <= position < given.positions:
        rule = f"is within the {given.positions} positions of the inputs"
        raise value_error("position", rule, got=position)
    draw = torch.Generator().manual_seed(seed)
    pick = _picked(given, position % given.positions, output)
    if how == "swap":
        return _swapped(model, given, pick, swaps, draw)
    return _jacobian(model, given, pick, probes, draw)


def _picked(
    given: Inputs, position: int, output: Callable[[Any], Tensor] | None
) -> Callable[[Any], Tensor]:
    """Make the function that gives the output vectors of a position, (batch, features)."""

    def pick(answer: Any) -> Tensor:
        found = tensors_in(answer if output is None else output(answer))
        for _, tensor in found:
            rows = rows_of(tensor, given, strict=True) if tensor.is_floating_point() else None
            if rows is not None:
                return rows[:, position]
        raise value_error(
            "model",
            f"must give an output with one entry for each of the {given.positions} positions",
            shapes={name or "output": tensor for name, tensor in found} or None,
            hint="output=lambda answer: ... picks the tensor that has them",
        )

    return pick


def _jacobian(
    model: Any, given: Inputs, pick: Callable[[Any], Tensor], probes: int, draw: torch.Generator
) -> Tensor:
    leaf = given.leaves[0]
    content = given.content(leaf)
    with torch.enable_grad():
        if leaf.tokens:
            embedding = embedding_of(model, content, given)
            if embedding is None:
                raise value_error(
                    "model", "has no embedding that the token ids go through",
                    hint="give float inputs (embeddings), or ask how='swap'",
                )  # fmt: skip
            with _embedded(embedding, content) as vectors:
                rows = pick(model(*given.args, **given.kwargs))
            entered, shape = vectors[0], (*content.shape, -1)
            axis, batch_axis = leaf.axis, leaf.batch_axis
        else:
            entered = content.detach().clone().requires_grad_()
            changed = given.replace({leaf.key: entered})
            rows = pick(model(*changed.args, **changed.kwargs))
            shape, axis, batch_axis = tuple(content.shape), leaf.axis, leaf.batch_axis
        squares = torch.zeros(given.batch, given.positions, dtype=_exact(rows.dtype))
        for probe, share in _probes(rows, probes, draw):
            (gradient,) = torch.autograd.grad(
                rows, entered, probe, retain_graph=True, allow_unused=True
            )
            if gradient is not None:
                squares += share * _by_position(gradient.reshape(shape), axis, batch_axis).cpu()
    return squares.sqrt().to(rows.dtype)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _probes(rows: Tensor, probes: int, draw: torch.Generator) -> Iterator[tuple[Tensor, float]]:
    """Give the directions to differentiate in, the same for all samples, and their share."""
    width = rows.shape[-1]
    if width <= _EXACT:
        for at in range(width):
            yield (
                torch.zeros_like(rows).index_fill(-1, torch.tensor(at, device=rows.device), 1.0),
                1.0,
            )
        return
    for _ in range(probes):
        signs = torch.randint(2, (width,), generator=draw) * 2 - 1
        yield signs.to(rows).expand_as(rows), 1 / probes


def _by_position(gradient: Tensor, axis: int, batch_axis: int | None) -> Tensor:
    """Sum squares over all axes but those of samples and positions: (batch, position)."""
    squares = gradient.detach().to(_exact(gradient.dtype)).square().movedim(axis, -1)
    if batch_axis is None:
        return squares.reshape(-1, squares.shape[-1]).sum(0, keepdim=True)
    batch = batch_axis - (batch_axis > axis)
    squares = squares.movedim(batch, 0)
    return squares.reshape(squares.shape[0], -1, squares.shape[-1]).sum(1)


@contextlib.contextmanager
def _embedded(embedding: nn.Embedding, ids: Tensor) -> Iterator[list[Tensor]]:
    """Let the vectors that the embedding gives for these ids be a leaf of the derivative."""
    vectors: list[Tensor] = []

    def leaf(module: nn.Module, args: Any, result: Tensor) -> Tensor | None:
        if vectors or not torch.equal(args[0].reshape(-1), ids.reshape(-1)):
            return None
        vectors.append(result.detach().clone().requires_grad_())
        return vectors[0] * 1

    handle = embedding.register_forward_hook(leaf)
    try:
        yield vectors
    finally:
        handle.remove()


@torch.no_grad()
def _swapped(
    model: Any, given: Inputs, pick: Callable[[Any], Tensor], swaps: int, draw: torch.Generator
) -> Tensor:
    leaf = given.leaves[0]
    content = given.content(leaf)
    before = pick(model(*given.args, **given.kwargs))
    others = [_other(model, given, content, draw) for _ in range(swaps)]
    change = torch.zeros(given.batch, given.positions, dtype=before.dtype)
    for at in range(given.positions):
        here = torch.zeros(given.positions, dtype=torch.bool, device=content.device)
        here[at] = True
        here = here.reshape([-1 if axis == leaf.axis else 1 for axis in range(content.ndim)])
        for other in others:
            changed = given.replace({leaf.key: torch.where(here, other, content)})
            after = pick(model(*changed.args, **changed.kwargs))
            change[:, at] += torch.linalg.vector_norm(after - before, dim=-1).cpu() / swaps
    return change


def _other(model: Any, given: Inputs, content: Tensor, draw: torch.Generator) -> Tensor:
    """Draw other content for every position: another token, or the vector of another position."""
    leaf = given.leaves[0]
    if not leaf.tokens:
        if given.positions == 1:
            raise value_error("inputs", "have one position: there is no other to swap with",
                              hint="how='jacobian'")  # fmt: skip
        steps = int(torch.randint(1, given.positions, (), generator=draw))
        return content.roll(steps, leaf.axis)
    embedding = embedding_of(model, content, given)
    if embedding is not None:
        size, low = embedding.num_embeddings, 0
    else:
        size, low = int(content.max()) + 1, int(content.min())
    if size - low < 2:
        raise value_error(
            "inputs", "have one token, and no other to swap it with", got=f"{size} token"
        )
    steps = torch.randint(1, size - low, content.shape, generator=draw).to(content)
    return low + (content - low + steps) % (size - low)
