"""The arguments that the audited model is called with, and which of them are content."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core import type_error, value_error

__all__ = ["ContentInput", "Key", "ModelInputs", "call", "name_of", "read_inputs"]

# The number of a positional argument or the name of a keyword argument.
Key = int | str
# Parts of the names of dict inputs that describe the positions instead of being their content.
_DESCRIPTIVE = ("mask", "position", "token_type", "segment", "document", "label", "length")
_DESCRIPTIVE += ("encoder_",)
_NOT_CONTENT = ("past_key_values", "memory", "src", "seq_idx", "cu_seq")
_MAIN = ("input_ids", "tokens", "ids", "inputs_embeds")


@dataclass(frozen=True)
class ContentInput:
    """One argument whose content may be replaced, and where its axes are."""

    key: Key
    axis: int  # of positions
    batch_axis: int | None
    tokens: bool


@dataclass(frozen=True)
class ModelInputs:
    """The arguments of the model, and which of them may be replaced at which axes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    content: tuple[ContentInput, ...]
    positions: int
    batch: int

    @property
    def main(self) -> ContentInput:
        """The content input that defines the positions and the samples."""
        return self.content[0]

    def __getitem__(self, key: Key) -> Any:
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    def named(self) -> dict[Key, Any]:
        """Every argument by its number or name."""
        return {**dict(enumerate(self.args)), **self.kwargs}

    def substitute(self, tensors: Mapping[Key, Any]) -> ModelInputs:
        """Return the same inputs with some arguments substituted."""
        args = tuple(tensors.get(number, value) for number, value in enumerate(self.args))
        kwargs = {name: tensors.get(name, value) for name, value in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs)

    def repeat(self, copies: int) -> ModelInputs:
        """Concatenate `copies` of the batch in every tensor that has the batch axis."""
        axis = self.main.batch_axis
        if copies == 1 or axis is None:
            return self

        def repeated(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim <= axis:
                return value
            return torch.cat([value] * copies, axis) if value.shape[axis] == self.batch else value

        return replace(self._mapped(repeated), batch=self.batch * copies)

    def to(self, dtype: torch.dtype) -> ModelInputs:
        """Convert the float tensors."""

        def converted(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if floating else value

        return self._mapped(converted)

    def _mapped(self, function: Callable[[Any], Any]) -> ModelInputs:
        kwargs = {name: function(value) for name, value in self.kwargs.items()}
        return replace(self, args=tuple(map(function, self.args)), kwargs=kwargs)


def read_inputs(
    inputs: Any, *, axis: int | None = None, change: Sequence[Key] | None = None
) -> ModelInputs:
    """Sort the arguments into content (which may be replaced) and the rest."""
    args, kwargs = _arguments(inputs)
    keys = list(change) if change else _content_keys(args, kwargs)
    if not keys:
        raise value_error(
            "inputs",
            "hold no token ids and no float tensor, so nothing can be changed",
            got=", ".join(map(str, kwargs)) or "no tensors",
            hint="name the input to change: change=['name'] (or a number, for a tuple)",
        )
    read = ModelInputs(args, kwargs, (), 0, 0)
    content = [_content_input(key, read.named(), axis) for key in keys]
    first = read[keys[0]]
    positions = first.shape[content[0].axis]
    batch_axis = content[0].batch_axis
    batch = 1 if batch_axis is None else first.shape[batch_axis]
    if positions == 0 or batch == 0:
        raise value_error("inputs", "need at least one position", shapes={str(keys[0]): first})
    fitting = tuple(one for one in content if _has_positions(read[one.key], one.axis, positions))
    return ModelInputs(args, kwargs, fitting, positions, batch)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    raise type_error(
        "inputs",
        "must be a tensor, a tuple of arguments or a dict of keyword arguments",
        got=type(inputs).__name__,
        hint="encode a text first: model.vocabulary.encode(text)[None], or a tokenizer",
    )


def _has_positions(value: Tensor, axis: int, positions: int) -> bool:
    return axis < value.ndim and value.shape[axis] == positions


def _content_keys(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Key]:
    if args:
        numbers: list[Key] = [n for n, value in enumerate(args) if _may_be_content(value)]
        return numbers[:1]
    if isinstance(kwargs.get("decoder_input_ids"), Tensor):
        return ["decoder_input_ids"]
    keys: list[Key] = [
        name
        for name, value in kwargs.items()
        if _may_be_content(value)
        and not any(word in name for word in _DESCRIPTIVE)
        and name not in _NOT_CONTENT
        and not name.startswith("cache")
    ]
    return sorted(keys, key=lambda name: name not in _MAIN)


def _may_be_content(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.dtype != torch.bool


def _content_input(key: Key, named: Mapping[Key, Any], axis: int | None) -> ContentInput:
    value = named.get(key)
    if not isinstance(value, Tensor) or not _may_be_content(value):
        raise type_error(
            "inputs",
            f"{key!r} must be a tensor of token ids or floats with a position axis",
            got=str(value.dtype) if isinstance(value, Tensor) else type(value).__name__,
        )
    tokens = not (value.is_floating_point() or value.is_complex())
    if axis is None:
        axis = min(1, value.ndim - 1) if tokens else (1 if value.ndim > 2 else 0)
    if not -value.ndim <= axis < value.ndim:
        raise value_error("axis", f"must be an axis of {key!r}", got=axis, shapes={"it": value})
    axis %= value.ndim
    second = 1 if value.ndim > (1 if tokens else 2) else None
    return ContentInput(key, axis, 0 if axis else second, tokens)


def call(model: Callable[..., Any], inputs: ModelInputs, edits: set[str] | None = None) -> Any:
    """Call the model on copies of its inputs; `edits` gets the names of those edited in place."""
    args = tuple(map(_copied, inputs.args))
    kwargs = {name: _copied(value) for name, value in inputs.kwargs.items()}
    with torch.no_grad(), _named_as_own(model):
        answer = model(*args, **kwargs)
    if edits is not None:
        given = inputs.named()
        used: dict[Key, Any] = {**dict(enumerate(args)), **kwargs}
        edits |= {str(key) for key, value in used.items() if _is_edited(value, given[key])}
    return answer


def name_of(model: object) -> str:
    """Name a model or function for the report."""
    if isinstance(model, nn.Module):
        return type(model).__name__
    return getattr(model, "__qualname__", None) or type(model).__name__


@contextmanager
def _named_as_own(model: object) -> Iterator[None]:
    """Add to an error of the model that it is the model's, where the version of Python can."""
    try:
        yield
    except Exception as error:
        note = f"raised by the model itself ({name_of(model)}), which the audit called"
        if sys.version_info >= (3, 11) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _is_edited(value: Any, given: Any) -> bool:
    if not isinstance(value, Tensor) or not value._version:
        return False
    return value.shape != given.shape or not bool(((value == given) | (value != value)).all())
