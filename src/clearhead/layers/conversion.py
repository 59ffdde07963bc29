"""`convert`: every `torch.nn.MultiheadAttention` of a model becomes a `MultiheadAttention`."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.nn.utils import parametrize

from clearhead._core import type_error, value_error
from clearhead.layers.multihead import MultiheadAttention

__all__ = ["convert"]

ModelT = TypeVar("ModelT", bound=nn.Module)


def convert(model: ModelT) -> ModelT:
    """Convert every `torch.nn.MultiheadAttention` of a model in place, and return the model.

    >>> import torch, clearhead as ch
    >>> encoder = torch.nn.TransformerEncoder(
    ...     torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), num_layers=2)
    >>> type(ch.convert(encoder).layers[0].self_attn).__module__
    'clearhead.layers.multihead'

    The layers stay the same objects with another class: parameters (also an optimizer's), hooks,
    shared layers, parametrizations, pruning, training mode, dtype and device are as they were.
    `nn.TransformerEncoder` and `nn.TransformerEncoderLayer` no longer bypass their layers in
    evaluation, so that their outputs are those of training, padded rows included.

    Subclasses of `nn.MultiheadAttention` and layers whose `forward` was replaced are refused by
    name, before anything is changed. Converting a model twice is allowed.
    """
    for layer in _convertible(model):
        _change_class(layer)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            # Otherwise it packs padded batches for the fused kernel and returns zeros there.
            module.use_nested_tensor = False
    return model


def _convertible(model: nn.Module) -> list[nn.MultiheadAttention]:
    """Return the layers to convert, or raise with the reason of each one that cannot be."""
    if not isinstance(model, nn.Module):
        raise type_error("model", "is a torch.nn.Module", got=type(model).__name__)
    found = {n: m for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    if not found:
        raise value_error(
            "model",
            "holds at least one torch.nn.MultiheadAttention",
            got=f"{type(model).__name__} without any",
            hint="models with attention of their own are watched as they are: clearhead.watch",
        )
    if reasons := [why for name, layer in found.items() if (why := _why_not(name, layer))]:
        rule = "holds layers that cannot be converted:\n  " + "\n  ".join(reasons)
        raise value_error("model", rule)
    return list(found.values())


def _why_not(name: str, layer: nn.MultiheadAttention) -> str | None:
    where, kind = name or "the model itself", parametrize.type_before_parametrizations(layer)
    if "forward" in vars(layer):
        return f"{where}: its forward was replaced by another function; put the method back first"
    if kind is not nn.MultiheadAttention and not issubclass(kind, MultiheadAttention):
        return (
            f"{where}: {kind.__name__} is a subclass; derive it from clearhead.MultiheadAttention"
        )
    return None


def _change_class(layer: nn.MultiheadAttention) -> None:
    if isinstance(layer, MultiheadAttention):
        return
    kind: Any = MultiheadAttention
    if parametrize.is_parametrized(layer):
        # torch made a class for this layer alone, with a property for each parametrized tensor.
        own = {n: x for n, x in vars(type(layer)).items() if n not in ("__dict__", "__weakref__")}
        kind = type(type(layer).__name__, (MultiheadAttention,), own)
    layer.__class__ = kind
