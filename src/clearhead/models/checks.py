"""Checks of model sizes and of token tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead._core import type_error, value_error
from clearhead.models.text import Characters

__all__ = ["check_sizes", "check_tokens"]


def check_sizes(vocabulary: Characters | int, dropout: float, **sizes: Any) -> int:
    """Refuse impossible sizes; return the number of tokens in the vocabulary."""
    if not isinstance(vocabulary, Characters | int):
        raise type_error("vocabulary", "needs to be Characters or a number", got=vocabulary)
    size = vocabulary if isinstance(vocabulary, int) else len(vocabulary)
    for name, number in {"vocabulary": size, **sizes}.items():
        if not isinstance(number, int) or not 1 <= number < 2**31:
            raise value_error(name, "needs to be a whole number of 1 or more", got=number)
    if not 0 <= dropout < 1:
        raise value_error("dropout", "needs to be at least 0 and below 1", got=dropout)
    heads, width = sizes.get("heads", 1), sizes["width"]
    if width % heads:
        raise value_error("heads", "needs to divide width", got=f"{heads} heads, width {width}")
    if "heads" in sizes and width // heads % 2:
        # Rotary embeddings rotate features in pairs.
        rule = "width / heads needs to be even"
        raise value_error("width", rule, got=f"{width} / {heads} = {width // heads}")
    return size


def check_tokens(tokens: Any, length: int | None = None, *, start: int = 0) -> None:
    """Refuse anything but token ids (batch, position); with `length`, too many of them."""
    rule = "are token numbers, an integer tensor (batch, position)"
    if not isinstance(tokens, Tensor):
        hint = "model.vocabulary.encode(text)[None] makes them of a text"
        raise type_error("tokens", rule, got=type(tokens).__name__, hint=hint)
    if tokens.is_floating_point() or tokens.is_complex():
        raise type_error("tokens", rule, got=tokens.dtype, shapes={"tokens": tokens})
    if tokens.ndim != 2:
        hint = "tokens[None] is a batch of one" if tokens.ndim == 1 else None
        raise value_error("tokens", rule, shapes={"tokens": tokens}, hint=hint)
    if length is not None and start + tokens.shape[1] > length:
        hint = f"give at most {length}, as the last ones: tokens[:, -{length}:]"
        got = start + tokens.shape[1]
        raise value_error("tokens", f"the model reads {length} positions", got=got, hint=hint)
