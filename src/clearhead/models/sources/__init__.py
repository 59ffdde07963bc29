"""Where a model comes from: shipped, a directory, the hub, a GGUF file, or a factory."""

from __future__ import annotations

from clearhead.models.sources.factory import (
    from_factory,
    is_factory,
    model_errors,
    refuse_bare_module,
)
from clearhead.models.sources.inputs import (
    maskable_inputs,
    named_inputs,
    packed_inputs,
    random_tokens,
)
from clearhead.models.sources.loader import LoadedModel, encode, find_model, load
from clearhead.models.sources.names import KINDS, missing_model
from clearhead.models.sources.tiny import tiny_model

__all__ = [
    "KINDS",
    "LoadedModel",
    "encode",
    "find_model",
    "from_factory",
    "is_factory",
    "load",
    "maskable_inputs",
    "missing_model",
    "model_errors",
    "named_inputs",
    "packed_inputs",
    "random_tokens",
    "refuse_bare_module",
    "tiny_model",
]
