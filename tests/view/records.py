"""Records of real calls, which the tests of the views share."""

from __future__ import annotations

from typing import Any

import torch

import clearhead as ch
from clearhead import masks, readings

__all__ = ["BATCH", "HEADS", "MODEL", "SIZE", "TEXT", "TOKENS", "of_a_call", "of_the_model"]

TEXT = "hell or shell"
MODEL = ch.models.load()
TOKENS = MODEL.vocabulary.encode(TEXT)[None]
BATCH, HEADS, SIZE = 2, 3, 11


def of_the_model(
    read: Any = None, tokens: torch.Tensor = TOKENS, model: Any = MODEL, **options: Any
) -> Any:
    """Watch a model on tokens: all weights, unless something else is to be read."""
    with torch.no_grad(), ch.watch(model, read=read or readings.Weights(), **options) as seen:
        model(tokens)
    return seen


def of_a_call(read: Any, size: int = SIZE, mask: Any = None) -> Any:
    """Watch one call on random inputs."""
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, size, 8)
    with torch.no_grad(), ch.watch(ch.attend, read=read) as seen:
        ch.attend(q, q, q, mask or masks.causal())
    return seen
