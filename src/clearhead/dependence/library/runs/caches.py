"""How a class of transformers takes and returns its cache."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["cache_name", "switches", "takes"]

# The names of caches, and of the arguments that switch them on.
NAMES = ("cache", "past_key_values", "cache_params", "state", "past_buckets_states", "mems")
SWITCHES = ("use_cache", "use_mems")


def takes(model: Any) -> list[str]:
    """The names of the arguments of a model, also of those that it passes on to its base."""
    parameters = inspect.signature(model.forward).parameters
    base = getattr(model, "base_model", model)
    passes_on = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    more = takes(base) if passes_on and base is not model else []
    return list(dict.fromkeys([*parameters, *more]))


def cache_name(model: Any) -> str:
    """The argument that takes the cache; the outputs have it under the same name."""
    known = takes(model)
    return next((name for name in NAMES if name in known), NAMES[0])


def switches(model: Any) -> tuple[dict[str, bool], dict[str, bool]]:
    """The arguments that make a model return a cache, and those that make it return none."""
    known = [name for name in SWITCHES if name in takes(model)]
    return dict.fromkeys(known, True), dict.fromkeys(known, False)
