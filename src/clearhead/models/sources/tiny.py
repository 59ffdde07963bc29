"""A model of the transformers library with two layers and random weights, from its config alone."""

from __future__ import annotations

from typing import Any

import torch

from clearhead._core import value_error
from clearhead.models.sources.hugging_face import auto_class, quiet, transformers_for

__all__ = ["tiny_model"]

# How many layers are kept, and what configs call their number.
KEPT = 2
COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
)


def tiny_model(name: str) -> Any:
    """Build the model of a directory or id in eval mode, shrunk to two layers of random weights.

    Only its config is read. Of layers of several types, one of each of the first two types is kept.
    """
    transformers = transformers_for(name)
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = transformers.AutoConfig.from_pretrained(name)
            config = type(config).from_dict(_shrunk(config.to_dict()))
            kind, _ = auto_class(transformers, config)
            model = kind.from_config(config, dtype=torch.float32)
    except Exception as error:
        # transformers raises many types here; the user needs the name and the reason.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        hint = f"give a directory with config.json or a model id ({reason[0]})"
        rule = "no model of two layers could be built"
        raise value_error("model", rule, got=repr(name), hint=hint) from error
    return model.eval()


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """Keep two layers of a config and of the configs inside of it."""
    counts = {config[name] for name in COUNTS if isinstance(config.get(name), int)}
    kept = {n: _kept(config, n) for n in counts if n > KEPT}
    return {name: _smaller(name, value, kept) for name, value in config.items()}


def _kept(config: dict[str, Any], count: int) -> list[int]:
    """Choose the layers that stay: the first, and the first of another type."""
    types = config.get("layer_types")
    if not isinstance(types, list) or len(types) != count:
        return list(range(KEPT))
    other = next((n for n in range(count) if types[n] != types[0]), 1)
    return [0, other]


def _smaller(name: str, value: Any, kept: dict[int, list[int]]) -> Any:
    if isinstance(value, dict):
        return _shrunk(value)
    if name in COUNTS and isinstance(value, int):
        return min(value, KEPT)
    if isinstance(value, list) and len(value) in kept:
        return [value[n] for n in kept[len(value)]]
    return value
