"""Inputs for a model that came without any: random tokens, and the model's own argument names."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core import value_error

__all__ = ["maskable_inputs", "named_inputs", "packed_inputs", "random_tokens"]


def random_tokens(model: Any, length: int) -> Tensor:
    """Draw one sequence of tokens from the model's vocabulary, (1, length), the same each time."""
    if length < 1:
        raise value_error("length", "must be at least 1", got=length)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    embeddings = [m for m in modules if isinstance(m, nn.Embedding)]
    if not embeddings:
        raise value_error(
            "model",
            "has no embedding, so there are no tokens to make up",
            hint="let the factory give (model, inputs)",
        )
    # The table of tokens is the first, as a rule; that of positions comes after it.
    size = embeddings[0].num_embeddings
    return torch.randint(size, (1, length), generator=torch.Generator().manual_seed(0))


def named_inputs(model: Any, inputs: Any) -> dict[str, Any]:
    """Give the inputs as a dict under the names of the model's own arguments."""
    if isinstance(inputs, dict):
        return inputs
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    return dict(zip(_arguments(model), values, strict=False))


def maskable_inputs(model: Any, inputs: Any) -> dict[str, Any]:
    """Give the named inputs of a model that takes a padding mask; refuse any other model."""
    takes = _arguments(model)
    any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    if "attention_mask" not in takes and not any_name:
        raise value_error(
            "padding",
            "needs a model that takes attention_mask",
            got=f"{type(model).__name__}({', '.join(takes)})",
            hint="let a factory give a model that does; audit.padding(..., mask=NAME) knows others",
        )
    return named_inputs(model, inputs)


def packed_inputs(model: Any, inputs: Any, ids: Sequence[int]) -> dict[str, Any]:
    """Give the named inputs of packed documents; position ids restart with each document."""
    inputs = named_inputs(model, inputs)
    if "position_ids" not in _arguments(model):
        return inputs
    places, start = [], 0
    for n, document in enumerate(ids):
        start = n if n and document != ids[n - 1] else start
        places.append(n - start)
    return {**inputs, "position_ids": torch.tensor([places])}


def _arguments(model: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(model, "forward", model)).parameters)
