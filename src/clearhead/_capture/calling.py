"""How a model is called with the inputs that a user gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from clearhead._core import type_error

__all__ = ["call_with"]


def call_with(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with a tensor, a tuple of arguments or a dict of keywords."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if hasattr(inputs, "keys"):
        return model(**inputs)
    if not isinstance(inputs, tuple | list):
        hint = (
            "encode a text first; a model of this library has model.vocabulary.encode(text)[None]"
        )
        rule = "are a tensor, a tuple of arguments or a dict of keywords"
        raise type_error("inputs", rule, got=type(inputs).__name__, hint=hint)
    return model(*inputs)
