"""Replacement content for the same positions: other tokens, other and large numbers."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from clearhead._core import value_error
from clearhead.dependence.subject.inputs import ContentInput, Key, ModelInputs, call

__all__ = ["Perturbation", "Replacement", "embedding_of", "replacements", "splice"]

# A tensor for each content input, to take the perturbed positions from.
Replacement = dict[Key, Tensor]


class Perturbation(NamedTuple):
    """Put replacement number `replacement` at `sources`, bool (batch, position)."""

    sources: Tensor
    replacement: int


def replacements(
    model: object, inputs: ModelInputs, count: int, vocab: int | range | None
) -> list[Replacement]:
    """Make `count` replacements, each of which differs from the inputs at every position."""
    generator = torch.Generator().manual_seed(20240229)
    made: list[Replacement] = [{} for _ in range(count)]
    for one in inputs.content:
        value = inputs[one.key]
        choices = _choices(model, inputs, one, vocab) if one.tokens else None
        for number in range(count):
            made[number][one.key] = (
                _other_numbers(value, number, generator)
                if choices is None
                else _other_tokens(value, choices, generator)
            )
    return made


def _choices(
    model: object, inputs: ModelInputs, one: ContentInput, vocab: int | range | None
) -> Tensor:
    ids = inputs[one.key]
    special = {getattr(getattr(model, "config", None), "pad_token_id", None)}
    if vocab is None:
        embedding = embedding_of(model, ids, inputs)
        if embedding is not None:
            vocab = embedding.num_embeddings
            special.add(embedding.padding_idx)
    # Without a known vocabulary only the ids in the inputs are surely valid: positions swap theirs.
    # A part of a large vocabulary is enough to choose from.
    if vocab is None:
        choices = ids.unique().cpu()
    else:
        known = vocab if isinstance(vocab, range) else range(vocab)
        choices = torch.tensor(known[:50_000], dtype=torch.long)
    kept = torch.tensor([c for c in choices.tolist() if c not in special], dtype=torch.long)
    choices = kept if len(kept) > 1 else choices
    if len(choices) < 2:
        raise value_error(
            "inputs",
            "there is no other token to put in place of this one",
            got=f"{len(choices)} token" + (" in the vocabulary" if vocab else " in the inputs"),
            hint="pass vocab= (the number of tokens), inputs with several different tokens, or "
            "float inputs (the embeddings) to the part behind the embedding",
        )
    return choices


def _other_tokens(ids: Tensor, choices: Tensor, generator: torch.Generator) -> Tensor:
    pick = torch.randint(len(choices), ids.shape, generator=generator)
    other = choices[pick].to(ids)
    following = choices[(pick + 1) % len(choices)].to(ids)
    return torch.where(other == ids, following, other)


def _other_numbers(value: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Draw numbers of the input's own spread, then large ones of both signs."""
    real = value.real if value.is_complex() else value
    spread = real.double().std(correction=0) if real.numel() > 1 else torch.tensor(1.0)
    spread = spread if torch.isfinite(spread) and spread > 0 else torch.tensor(1.0)
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
    if number % 2:
        noise = noise * min(100.0, 0.01 * torch.finfo(real.dtype).max / float(spread))
    return (real.double().nanmean() + spread * noise).to(value.dtype)


def splice(inputs: ModelInputs, replacement: Replacement, sources: Tensor) -> ModelInputs:
    """Take the replacement at the sources (batch, position), the inputs elsewhere."""
    spliced: Replacement = {}
    for one in inputs.content:
        value = inputs[one.key]
        where = _aligned(sources, one, value, inputs).to(value.device)
        spliced[one.key] = torch.where(where, replacement[one.key], value)
    return inputs.substitute(spliced)


def _aligned(sources: Tensor, one: ContentInput, value: Tensor, inputs: ModelInputs) -> Tensor:
    """Reshape (batch, position) so that it broadcasts to the value."""
    shape = [1] * value.ndim
    shape[one.axis] = inputs.positions
    if one.batch_axis is None:
        return sources.any(0).reshape(shape)
    shape[one.batch_axis] = inputs.batch
    return (sources.T if one.batch_axis > one.axis else sources).reshape(shape)


class _Found(Exception):
    """Ends the run that searches for the embedding."""


def embedding_of(model: object, ids: Tensor, inputs: ModelInputs) -> nn.Embedding | None:
    """Find the embedding that the token ids go through."""
    if not isinstance(model, nn.Module):
        return None
    seen: list[nn.Embedding] = []

    def check(module: nn.Module, args: tuple[object, ...]) -> None:
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if given is None or given.numel() != ids.numel() or not isinstance(module, nn.Embedding):
            return
        if torch.equal(given.reshape(-1).to(ids), ids.reshape(-1)):
            seen.append(module)
            raise _Found

    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    handles = [module.register_forward_pre_hook(check) for module in embeddings]
    try:
        with suppress(_Found):
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen[0] if seen else None
