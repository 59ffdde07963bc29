"""influence(): how strongly an output depends on the input of each position."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core import is_number, type_error, value_error
from clearhead.dependence.subject import (
    ModelInputs,
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
    - `seed`: of the probes and swaps; torch's own RNG state does not change.

    The result is (batch, position). In training mode dropout adds its noise to it: call
    `model.eval()` first.
    """
    _check_options(how, probes, swaps)
    read = read_inputs(inputs)
    pick = _picked(read, _index(position, read), output)
    draw = torch.Generator().manual_seed(seed)
    if how == "swap":
        return _swapped(model, read, pick, swaps, draw)
    return _jacobian(model, read, pick, probes, draw)


def _check_options(how: str, probes: int, swaps: int) -> None:
    if how not in HOW:
        raise value_error("how", f"is one of {', '.join(HOW)}", got=repr(how))
    for name, number in (("probes", probes), ("swaps", swaps)):
        if not is_number(number) or number < 1:
            raise value_error(name, "is 1 or more", got=number)


def _index(position: int, read: ModelInputs) -> int:
    if not is_number(position):
        raise type_error("position", "is a number", got=repr(position))
    if not -read.positions <= position < read.positions:
        rule = f"is within the {read.positions} positions of the inputs"
        raise value_error("position", rule, got=position)
    return position % read.positions


def _picked(
    read: ModelInputs, position: int, output: Callable[[Any], Tensor] | None
) -> Callable[[Any], Tensor]:
    """Make the function that returns the output vectors of a position, (batch, features)."""

    def pick(answer: Any) -> Tensor:
        found = tensors_in(answer if output is None else output(answer))
        for _, tensor in found:
            rows = rows_of(tensor, read, strict=True) if tensor.is_floating_point() else None
            if rows is not None:
                return rows[:, position]
        raise value_error(
            "model",
            f"must give an output with one entry for each of the {read.positions} positions",
            shapes={name or "output": tensor for name, tensor in found} or None,
            hint="output=lambda answer: ... picks the tensor that has them",
        )

    return pick


def _jacobian(
    model: Any, read: ModelInputs, pick: Callable[[Any], Tensor], probes: int, draw: torch.Generator
) -> Tensor:
    main = read.main
    with torch.enable_grad():
        rows, entered = _differentiable(model, read, pick)
        shape = (*read[main.key].shape, -1) if main.tokens else entered.shape
        squares = torch.zeros(read.batch, read.positions, dtype=_exact(rows.dtype))
        for probe, weight in _probes(rows, probes, draw):
            (gradient,) = torch.autograd.grad(
                rows, entered, probe, retain_graph=True, allow_unused=True
            )
            if gradient is not None:
                by_position = _by_position(gradient.reshape(shape), main.axis, main.batch_axis)
                squares += weight * by_position.cpu()
    return squares.sqrt().to(rows.dtype)


def _differentiable(
    model: Any, read: ModelInputs, pick: Callable[[Any], Tensor]
) -> tuple[Tensor, Tensor]:
    """Run once; return the output rows and the input vectors that they are differentiated by."""
    content = read[read.main.key]
    if not read.main.tokens:
        vectors = content.detach().clone().requires_grad_()
        entered = read.substitute({read.main.key: vectors})
        return pick(model(*entered.args, **entered.kwargs)), vectors
    embedding = embedding_of(model, content, read)
    if embedding is None:
        raise value_error(
            "model", "has no embedding that the token ids go through",
            hint="pass float inputs (embeddings), or how='swap'",
        )  # fmt: skip
    with _embedded(embedding, content) as embedded:
        rows = pick(model(*read.args, **read.kwargs))
    return rows, embedded[0]


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _probes(rows: Tensor, probes: int, draw: torch.Generator) -> Iterator[tuple[Tensor, float]]:
    """Yield the directions to differentiate in, the same for all samples, and their weight."""
    width = rows.shape[-1]
    if width <= _EXACT:
        for index in torch.arange(width, device=rows.device):
            yield torch.zeros_like(rows).index_fill(-1, index, 1.0), 1.0
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
    """Make the vectors that the embedding returns for these ids a leaf of the autograd graph."""
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
    model: Any, read: ModelInputs, pick: Callable[[Any], Tensor], swaps: int, draw: torch.Generator
) -> Tensor:
    main, content = read.main, read[read.main.key]
    before = pick(model(*read.args, **read.kwargs))
    others = [_other(model, read, draw) for _ in range(swaps)]
    change = torch.zeros(read.batch, read.positions, dtype=before.dtype)
    for position in range(read.positions):
        here = torch.arange(read.positions, device=content.device) == position
        here = here.reshape([-1 if axis == main.axis else 1 for axis in range(content.ndim)])
        for other in others:
            swapped = read.substitute({main.key: torch.where(here, other, content)})
            after = pick(model(*swapped.args, **swapped.kwargs))
            change[:, position] += torch.linalg.vector_norm(after - before, dim=-1).cpu() / swaps
    return change


def _other(model: Any, read: ModelInputs, draw: torch.Generator) -> Tensor:
    """Draw other content for every position: another token, or the vector of another position."""
    main, content = read.main, read[read.main.key]
    if not main.tokens:
        if read.positions == 1:
            raise value_error("inputs", "have one position: there is no other to swap with",
                              hint="how='jacobian'")  # fmt: skip
        offset = int(torch.randint(1, read.positions, (), generator=draw))
        return content.roll(offset, main.axis)
    embedding = embedding_of(model, content, read)
    if embedding is not None:
        size, low = embedding.num_embeddings, 0
    else:
        size, low = int(content.max()) + 1, int(content.min())
    if size - low < 2:
        raise value_error(
            "inputs", "have one token, and no other to swap it with", got=f"{size} token"
        )
    offsets = torch.randint(1, size - low, content.shape, generator=draw).to(content)
    return low + (content - low + offsets) % (size - low)
