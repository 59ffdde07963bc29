"""Other content for the same positions: other tokens, other and large numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead._core import value_error
from clearhead.dependence.proof.subject import Inputs, Leaf, embedding_of

__all__ = ["Content", "contents", "splice"]

# A tensor for each leaf, to take the changed positions from.
Content = dict[int | str, Tensor]


def contents(model: object, inputs: Inputs, count: int, vocab: int | None) -> list[Content]:
    """Make `count` different contents, each differing from the inputs at every position."""
    generator = torch.Generator().manual_seed(20240229)
    made: list[Content] = [{} for _ in range(count)]
    for leaf in inputs.leaves:
        value = inputs.content(leaf)
        choices = _choices(model, inputs, leaf, vocab) if leaf.tokens else None
        for number in range(count):
            if choices is not None:
                other = _other_tokens(value, choices, generator)
            else:
                other = _other_numbers(value, number, generator)
            made[number][leaf.key] = other
    return made


def _choices(model: object, inputs: Inputs, leaf: Leaf, vocab: int | None) -> Tensor:
    ids = inputs.content(leaf)
    special = {getattr(getattr(model, "config", None), "pad_token_id", None)}
    if vocab is None:
        embedding = embedding_of(model, ids, inputs)
        if embedding is not None:
            vocab = embedding.num_embeddings
            special.add(embedding.padding_idx)
    # Of an unknown vocabulary only what is there is surely a token: the positions swap theirs.
    # Of a large one some are plenty to choose from.
    choices = ids.unique().cpu() if vocab is None else torch.arange(min(vocab, 50_000))
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
    """Give numbers of the input's own spread, then large ones of both signs."""
    real = value.real if value.is_complex() else value
    spread = real.double().std(correction=0) if real.numel() > 1 else torch.tensor(1.0)
    spread = spread if torch.isfinite(spread) and spread > 0 else torch.tensor(1.0)
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
    if number % 2:
        noise = noise * min(100.0, 0.01 * torch.finfo(real.dtype).max / float(spread))
    return (real.double().nanmean() + spread * noise).to(value.dtype)


def splice(inputs: Inputs, content: Content, sources: Tensor) -> Inputs:
    """Take `content` at the sources (batch, position), the inputs elsewhere."""
    changed: Content = {}
    for leaf in inputs.leaves:
        value = inputs.content(leaf)
        shape = [1] * value.ndim
        shape[leaf.axis] = inputs.positions
        where = sources
        if leaf.batch_axis is None:
            where = sources.any(0, keepdim=True)
        else:
            shape[leaf.batch_axis] = inputs.batch
            if leaf.batch_axis > leaf.axis:
                where = where.T
        changed[leaf.key] = torch.where(
            where.reshape(shape).to(value.device), content[leaf.key], value
        )
    return inputs.replace(changed)
