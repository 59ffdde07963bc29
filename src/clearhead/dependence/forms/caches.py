"""How a model takes its cache and returns it, found from its signature and its outputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clearhead._core import type_error
from clearhead.dependence.forms.decoding import StepFunction, named_arguments
from clearhead.dependence.subject import ModelInputs, call, name_of

__all__ = ["find_step", "without_cache"]

# Names under which models take a cache; where the outputs repeat a parameter, any name serves.
CACHES = (
    "cache", "past_key_values", "cache_params", "past_buckets_states", "past", "layer_past",
    "kv_cache", "mems", "state", "states", "hidden", "hidden_state", "hx", "h0",
)  # fmt: skip
SWITCHES = ("use_cache", "use_mems")


def without_cache(read: ModelInputs, model: Any) -> ModelInputs:
    """Return the inputs for one pass over everything, which makes no cache."""
    names = _parameters(model)
    kwargs = {name: value for name, value in read.kwargs.items() if name not in CACHES}
    return replace(read, kwargs=kwargs | {name: False for name in SWITCHES if name in names})


def find_step(model: Any, read: ModelInputs) -> StepFunction:
    """Find out how the model takes its cache and returns it, by running it once."""
    names = _parameters(model)
    if "cache" in names and hasattr(model, "new_cache"):
        return _own_step
    switches = {name: True for name in SWITCHES if name in names}
    one_pass = without_cache(read, model)
    answer = call(model, replace(one_pass, kwargs=one_pass.kwargs | switches))
    returned = _items(answer)
    found = [name for name in _known_first(names) if returned.get(name) is not None]
    if found:
        return _named_step(found[0], switches)
    taken = [name for name in CACHES if name in names]
    if taken and isinstance(answer, tuple) and len(answer) > 1:
        return _positional_step(taken[0])
    wrapped = [name for name in CACHES if returned.get(name) is not None]
    if wrapped and _takes_any(model):
        step = _named_step(wrapped[0], switches)
        if _is_used(model, one_pass, step):
            return step
    raise type_error(
        "model",
        "has no cache that could be tested: "
        + (f"it takes {taken[0]}, but returns none" if taken else "it takes none"),
        got=f"{name_of(model)}({', '.join(names)})"
        + (f" -> {', '.join(map(str, returned))}" if returned else ""),
        hint="pass step=, a function (model, arguments, cache) -> (outputs, cache)",
    )


def _parameters(model: Any) -> list[str]:
    return list(inspect.signature(getattr(model, "forward", model)).parameters)


def _takes_any(model: Any) -> bool:
    parameters = inspect.signature(getattr(model, "forward", model)).parameters.values()
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def _known_first(names: list[str]) -> list[str]:
    return [name for name in CACHES if name in names] + [n for n in names if n not in CACHES]


def _items(answer: Any) -> dict[str, Any]:
    """Return the named parts of what a model returns."""
    if isinstance(answer, Mapping):
        return {str(name): value for name, value in answer.items()}
    if is_dataclass(answer):
        return {field.name: getattr(answer, field.name) for field in fields(answer)}
    names = getattr(answer, "_fields", ())  # of a named tuple
    return {name: getattr(answer, name) for name in names}


def _own_step(model: Any, arguments: dict[str, Any], cache: Any) -> tuple[Any, Any]:
    cache = model.new_cache() if cache is None else cache
    return model(**arguments, cache=cache), cache


def _named_step(name: str, switches: dict[str, bool]) -> StepFunction:
    def step(model: Any, arguments: dict[str, Any], cache: Any) -> tuple[Any, Any]:
        returned = _items(model(**{**arguments, name: cache, **switches}))
        # The first output is the prediction; others may have no position axis in a chunk.
        first = next(key for key, value in returned.items() if isinstance(value, Tensor))
        return {first: returned[first]}, returned[name]

    return step


def _positional_step(name: str) -> StepFunction:
    def step(model: Any, arguments: dict[str, Any], cache: Any) -> tuple[Any, Any]:
        answer = model(**{**arguments, name: cache})
        return {"0": answer[0]}, answer[-1]

    return step


def _is_used(model: Any, read: ModelInputs, step: StepFunction) -> bool:
    """Whether a cache that is passed by `**kwargs` changes what comes out."""
    arguments = named_arguments(model, read.args, read.kwargs)
    with torch.no_grad():
        first, cache = step(model, arguments, None)
        again, _ = step(model, arguments, cache)
    return not all(torch.equal(first[key], again[key]) for key in first)
