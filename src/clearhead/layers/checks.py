"""The checks of `MultiheadAttention`: its constructor, its flags and its inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead._core import type_error, value_error

__all__ = ["LayerSizes", "construction", "flags", "nested", "shapes", "tensors"]


class LayerSizes(NamedTuple):
    """The sizes of one call of a layer; `batched` is False for inputs without a batch axis."""

    batch: int
    heads: int
    query: int
    source: int
    batched: bool


def construction(
    embed_dim: Any, num_heads: Any, dropout: Any, kdim: int | None, vdim: int | None
) -> None:
    """Check the sizes and the dropout probability of a new layer."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim}
    for name, size in sizes.items():
        if size is None and name in ("kdim", "vdim"):
            continue
        if not isinstance(size, int) or isinstance(size, bool):
            raise type_error(name, "is a whole number", got=type(size).__name__)
        if size <= 0:
            raise value_error(name, "is positive", got=size)
    if embed_dim % num_heads:
        raise value_error(
            "embed_dim",
            "is a whole multiple of num_heads",
            got=f"{embed_dim} for {num_heads} heads",
            hint=f"take embed_dim={(embed_dim // num_heads + 1) * num_heads}",
        )
    if not isinstance(dropout, (int, float)):
        raise type_error("dropout", "is a number", got=type(dropout).__name__)
    if not 0 <= dropout <= 1:
        raise value_error("dropout", "is a probability, 0 to 1", got=dropout)


def flags(**given: Any) -> None:
    """Check the flags of a call; this also catches a mask passed one position too late."""
    for name, value in given.items():
        if not isinstance(value, (bool, int, type(None))):
            raise type_error(
                name,
                "is True or False",
                got="a tensor" if isinstance(value, Tensor) else repr(value),
                hint="pass masks by name: mask=, attn_mask= or key_padding_mask=",
            )


def tensors(weight: Tensor, query: Any, key: Any, value: Any) -> None:
    """Check the types of the inputs against each other and against the layer's parameters."""
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        _check_kind(name, x)
        _check_matches(name, x, weight)
    if len({x.is_nested for x in given.values()}) > 1:
        nested_ones = [name for name, x in given.items() if x.is_nested]
        raise type_error(
            "query, key, value",
            "are all nested tensors or all dense ones",
            got=f"nested {' and '.join(nested_ones)} beside dense ones",
        )


def _check_kind(name: str, x: Any) -> None:
    rule = "is a floating-point tensor"
    if not isinstance(x, Tensor):
        raise type_error(name, rule, got=type(x).__name__, hint="wrap it in torch.as_tensor")
    if not x.is_floating_point():
        hint = "embed token ids first; convert other numbers with .float()"
        raise type_error(name, rule, got=x.dtype, hint=hint)
    if x.layout not in (torch.strided, torch.jagged):
        raise type_error(name, "is a dense tensor", got=x.layout, hint=f"{name}.to_dense()")


def _check_matches(name: str, x: Tensor, weight: Tensor) -> None:
    """Check dtype and device against the parameters."""
    if x.dtype != weight.dtype and not _autocasts(x, weight):
        raise type_error(
            name,
            "has the dtype of the layer's parameters",
            got=f"{x.dtype} beside {weight.dtype}",
            hint=f"{name}.to({weight.dtype}), or layer.to({x.dtype})",
        )
    if x.device != weight.device:
        raise value_error(
            name,
            "is on the device of the layer's parameters",
            got=f"{x.device} beside {weight.device}",
            hint=f"{name}.to({str(weight.device)!r}), or layer.to({str(x.device)!r})",
        )


def _autocasts(x: Tensor, weight: Tensor) -> bool:
    """Whether autocast brings both to one dtype; it does not change float64."""
    doubled = torch.float64 in (x.dtype, weight.dtype)
    return torch.is_autocast_enabled(x.device.type) and not doubled


def nested(
    layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, **others: Any
) -> None:
    """Check that nested inputs match, and that no other argument assumes a single size."""
    if not layer.batch_first:
        hint = "make the layer with batch_first=True"
        raise value_error("query", "may be nested only in a layer with batch_first=True", hint=hint)
    for name, given in others.items():
        if given is not None:
            raise value_error(
                name,
                "does not go with nested tensors, whose samples have sizes of their own",
                hint="call the layer for each sample, or pad and pass key_padding_mask",
            )
    counts = [x.size(0) for x in (query, key, value)]
    if len(set(counts)) > 1:
        raise value_error("query, key, value", "have as many samples", got=counts)


def shapes(layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> LayerSizes:
    """Check the shapes of the inputs and return the sizes of the call."""
    given = {"query": query, "key": key, "value": value}
    axes = "(batch, position, width)" if layer.batch_first else "(position, batch, width)"
    if query.ndim not in (2, 3):
        rule = f"is {axes}, or (position, width) without a batch"
        hint = "the layer makes the heads itself: flatten head and head_dim into the width"
        raise value_error("query", rule, shapes=given, hint=hint)
    for name, option, width in (
        ("query", "embed_dim", layer.embed_dim),
        ("key", "kdim", layer.kdim),
        ("value", "vdim", layer.vdim),
    ):
        _check_width(name, option, width, given)
    sizes = _sizes(layer, query, key)
    _check_batches(layer, axes, given)
    if key.shape[:-1] != value.shape[:-1]:
        hint = "give one value for each key"
        raise value_error("value", "has the axes of key except the width", shapes=given, hint=hint)
    return sizes


def _check_width(name: str, option: str, width: int, given: dict[str, Tensor]) -> None:
    if given[name].ndim != given["query"].ndim:
        hint = "give all three a batch axis, or none"
        raise value_error(name, "has as many axes as query", shapes=given, hint=hint)
    got = given[name].shape[-1]
    if got != width:
        raise value_error(
            name,
            f"has the width the layer was made for, {option}={width}",
            got=got,
            shapes=given,
            hint=f"project it to {width}, or make the layer with {option}={got}",
        )


def _sizes(layer: nn.MultiheadAttention, query: Tensor, key: Tensor) -> LayerSizes:
    if query.ndim == 2:
        return LayerSizes(1, layer.num_heads, query.shape[0], key.shape[0], False)
    at = 0 if layer.batch_first else 1
    positions = query.shape[1 - at], key.shape[1 - at]
    return LayerSizes(query.shape[at], layer.num_heads, *positions, True)


def _check_batches(layer: nn.MultiheadAttention, axes: str, given: dict[str, Tensor]) -> None:
    query, key = given["query"], given["key"]
    at = 0 if layer.batch_first else 1
    if query.ndim == 3 and query.shape[at] != key.shape[at]:
        raise value_error(
            "key",
            "has the batch size of query",
            got=f"{key.shape[at]} beside {query.shape[at]}",
            shapes=given,
            hint=f"the layer reads {axes} (batch_first={layer.batch_first}); "
            "expand the smaller batch, or transpose",
        )
