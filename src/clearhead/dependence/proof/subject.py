"""The model under audit: what it is called with, what of it may be changed, and what comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._core import type_error, value_error

__all__ = ["Inputs", "Leaf", "Output", "call", "outputs_of", "read_inputs", "rows_of", "tensors_in"]

# Keys of dict inputs that say something about the positions instead of being their content.
_ABOUT = ("mask", "position", "token_type", "segment", "document", "label", "length", "encoder_")
_NOT_CONTENT = ("past_key_values", "memory", "src", "seq_idx", "cu_seq")


@dataclass(frozen=True)
class Leaf:
    """One input whose content may be changed."""

    key: int | str
    axis: int  # of positions
    batch_axis: int | None
    tokens: bool


@dataclass(frozen=True)
class Inputs:
    """The arguments of the model, and which of them may be changed where."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Leaf, ...]
    positions: int
    batch: int

    def content(self, leaf: Leaf) -> Tensor:
        """The tensor that stands at a leaf."""
        return self.args[leaf.key] if isinstance(leaf.key, int) else self.kwargs[leaf.key]

    def replace(self, contents: Mapping[int | str, Any]) -> Inputs:
        """Give the same inputs with some of them changed."""
        args = tuple(contents.get(number, value) for number, value in enumerate(self.args))
        kwargs = {name: contents.get(name, value) for name, value in self.kwargs.items()}
        return Inputs(args, kwargs, self.leaves, self.positions, self.batch)

    def repeat(self, copies: int) -> Inputs:
        """Stand `copies` of the batch side by side, in every tensor that has the batch axis."""
        axis = self.leaves[0].batch_axis
        if copies == 1 or axis is None:
            return self

        def several(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim <= axis:
                return value
            return torch.cat([value] * copies, axis) if value.shape[axis] == self.batch else value

        return Inputs(
            tuple(map(several, self.args)),
            {name: several(value) for name, value in self.kwargs.items()},
            self.leaves,
            self.positions,
            self.batch * copies,
        )

    def to(self, dtype: torch.dtype) -> Inputs:
        """Convert the float tensors."""

        def converted(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if floating else value

        return Inputs(
            tuple(map(converted, self.args)),
            {name: converted(value) for name, value in self.kwargs.items()},
            self.leaves,
            self.positions,
            self.batch,
        )


@dataclass(frozen=True)
class Output:
    """One output as (batch, position, everything else)."""

    name: str
    rows: Tensor


def read_inputs(inputs: Any, *, axis: int | None, change: Sequence[int | str] | None) -> Inputs:
    """Sort the arguments into what is content (and may be changed) and what is not."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Tensor):
        args = (inputs,)
    elif isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    elif isinstance(inputs, tuple | list):
        args = tuple(inputs)
    else:
        raise type_error(
            "inputs",
            "must be a tensor, a tuple of arguments or a dict of keyword arguments",
            got=type(inputs).__name__,
            hint="encode a text first: model.vocabulary.encode(text)[None], or a tokenizer",
        )
    keys = list(change) if change else _content_keys(args, kwargs)
    if not keys:
        raise value_error(
            "inputs",
            "hold no token ids and no float tensor, so nothing can be changed",
            got=", ".join(map(str, kwargs)) or "no tensors",
            hint="name the input to change: change=['name'] (or a number, for a tuple)",
        )
    leaves = [_leaf(key, args, kwargs, axis) for key in keys]
    first = args[keys[0]] if isinstance(keys[0], int) else kwargs[keys[0]]
    positions = first.shape[leaves[0].axis]
    batch = 1 if leaves[0].batch_axis is None else first.shape[leaves[0].batch_axis]
    values = {key: args[key] if isinstance(key, int) else kwargs[key] for key in keys}
    fitting = tuple(
        leaf
        for leaf in leaves
        if leaf.axis < values[leaf.key].ndim and values[leaf.key].shape[leaf.axis] == positions
    )
    if positions == 0 or batch == 0:
        raise value_error("inputs", "need at least one position", shapes={str(keys[0]): first})
    return Inputs(args, kwargs, fitting, positions, batch)


def _content_keys(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | str]:
    if args:
        tensors = [n for n, value in enumerate(args) if isinstance(value, Tensor) and value.ndim]
        return [*[n for n in tensors if args[n].dtype != torch.bool][:1]]
    if isinstance(kwargs.get("decoder_input_ids"), Tensor):
        return ["decoder_input_ids"]
    keys: list[int | str] = [
        name
        for name, value in kwargs.items()
        if isinstance(value, Tensor)
        and value.ndim
        and value.dtype != torch.bool
        and not any(word in name for word in _ABOUT)
        and name not in _NOT_CONTENT
        and not name.startswith("cache")
    ]
    ids: list[int | str] = [
        name for name in keys if name in ("input_ids", "tokens", "ids", "inputs_embeds")
    ]
    return ids + [name for name in keys if name not in ids]


def _leaf(key: int | str, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int | None) -> Leaf:
    value = args[key] if isinstance(key, int) else kwargs.get(key)
    if not isinstance(value, Tensor) or value.ndim == 0 or value.dtype == torch.bool:
        raise type_error(
            "inputs",
            f"{key!r} must be a tensor of token ids or floats with a position axis",
            got=type(value).__name__ if not isinstance(value, Tensor) else str(value.dtype),
        )
    tokens = not (value.is_floating_point() or value.is_complex())
    if axis is None:
        axis = min(1, value.ndim - 1) if tokens else (1 if value.ndim > 2 else 0)
    if not -value.ndim <= axis < value.ndim:
        raise value_error("axis", f"must be an axis of {key!r}", got=axis, shapes={"it": value})
    axis %= value.ndim
    behind = 1 if value.ndim > (1 if tokens else 2) else None
    batch_axis = 0 if axis else behind
    return Leaf(key, axis, batch_axis, tokens)


def call(model: Callable[..., Any], inputs: Inputs, edits: set[str] | None = None) -> Any:
    """Call the model on copies, as it may edit its inputs in place; `edits` gets their names."""
    args = tuple(map(_fresh, inputs.args))
    kwargs = {name: _fresh(value) for name, value in inputs.kwargs.items()}
    with torch.no_grad():
        answer = model(*args, **kwargs)
    if edits is not None:
        given = {**dict(enumerate(inputs.args)), **inputs.kwargs}
        used = {**dict(enumerate(args)), **kwargs}
        edits |= {
            str(key)
            for key, value in used.items()
            if isinstance(value, Tensor) and value._version and not _same(value, given[key])
        }
    return answer


def _fresh(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _same(value: Tensor, given: Tensor) -> bool:
    return value.shape == given.shape and bool(((value == given) | (value != value)).all())


def outputs_of(answer: Any, inputs: Inputs) -> list[Output]:
    """Find the outputs that have a position axis, by its size, and lay them out alike."""
    named = list(tensors_in(answer, ""))
    found = [
        Output(name, rows)
        for name, tensor in named
        if (rows := rows_of(tensor, inputs, strict=True)) is not None
    ]
    if not found:
        raise value_error(
            "model",
            f"must give an output with one entry for each of the {inputs.positions} positions",
            shapes={name or "output": tensor for name, tensor in named} or None,
            got="an output without tensors" if not named else None,
            hint="audit a function that returns such an output, e.g. `lambda ids: model(ids)[0]` or"
            " the hidden states before pooling; say axis= where positions are on another axis",
        )
    return found


def rows_of(tensor: Tensor, inputs: Inputs, *, strict: bool = False) -> Tensor | None:
    """View a tensor as (batch, position, rest), or None where no axis is as long as the input."""
    leaf, shape = inputs.leaves[0], tensor.shape
    axis = _position_axis(shape, leaf.axis, inputs.positions)
    if axis is None:
        flat = inputs.batch * inputs.positions
        if strict or not shape or shape[0] != flat or leaf.axis != 1:
            return None
        return tensor.reshape(inputs.batch, inputs.positions, -1)
    rows = tensor.movedim(axis, 0)
    batch_axis = leaf.batch_axis
    if batch_axis is None:
        return rows.reshape(1, inputs.positions, -1)
    # With the position axis in front, the batch axis is the next one of the right size.
    sizes = list(rows.shape[1:])
    if inputs.batch not in sizes:
        return rows.reshape(1, inputs.positions, -1) if inputs.batch == 1 or not strict else None
    rows = rows.movedim(1 + sizes.index(inputs.batch), 0)
    return rows.reshape(inputs.batch, inputs.positions, -1)


def _position_axis(shape: torch.Size, usual: int, positions: int) -> int | None:
    # A map of queries and sources (weights, masks): the query axis is the one before the last.
    if len(shape) > 3 and shape[-1] == shape[-2] == positions:
        return len(shape) - 2
    if len(shape) > usual and shape[usual] == positions:
        return usual
    return next((axis for axis, size in enumerate(shape) if size == positions and axis), None)


def tensors_in(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """List the tensors in nested tuples, lists, dicts and dataclasses, with their dotted names."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if is_dataclass(value) and not isinstance(value, Mapping):
        value = {part.name: getattr(value, part.name) for part in fields(value)}
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, tuple | list):
        parts = [(str(number), part) for number, part in enumerate(value)]
    else:
        return []
    return [
        pair for key, part in parts for pair in tensors_in(part, f"{name}.{key}" if name else key)
    ]


class _Found(Exception):
    """Ends the run that looks for the embedding."""


def embedding_of(model: object, ids: Tensor, inputs: Inputs) -> nn.Embedding | None:
    """Find the embedding that the token ids go through."""
    if not isinstance(model, nn.Module):
        return None
    seen: list[nn.Embedding] = []

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if given is None or given.numel() != ids.numel() or not isinstance(module, nn.Embedding):
            return
        if torch.equal(given.reshape(-1).to(ids), ids.reshape(-1)):
            seen.append(module)
            raise _Found

    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    handles = [module.register_forward_pre_hook(look) for module in embeddings]
    with suppress(_Found):
        try:
            call(model, inputs)
        finally:
            for handle in handles:
                handle.remove()
    return seen[0] if seen else None
