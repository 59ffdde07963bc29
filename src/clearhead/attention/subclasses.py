"""Subclasses of Tensor that override nothing, which are served as plain tensors are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["as_plain", "as_subclass", "bare"]

PLAIN = (Tensor, torch.nn.Parameter)
# What a class inherits that intercepts no call. Each access to a bound method makes a new one.
_INHERITED = getattr(Tensor.__torch_function__, "__func__", None)
_DISABLED = torch._C._disabled_torch_function_impl


def bare(x: Any) -> Any:
    """The tensor as a plain one where its class adds nothing to Tensor or Parameter."""
    if type(x) in PLAIN or not isinstance(x, Tensor) or not _adds_nothing(type(x)):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)  # pyright: ignore[reportArgumentType]


def as_plain(*tensors: Any) -> tuple[Any, ...] | None:
    """The tensors as plain ones; None where none of them is a subclass that adds nothing."""
    found = tuple(map(bare, tensors))
    same = all(a is b for a, b in zip(found, tensors, strict=True))
    return None if same else found


def as_subclass(results: Any, *tensors: Any) -> Any:
    """The results in the subclass of the first tensor that has one, as torch's functions do."""
    kind = next(type(x) for x in tensors if isinstance(x, Tensor) and type(x) not in PLAIN)
    return pytree.tree_map_only(Tensor, lambda x: x.as_subclass(kind), results)


def _adds_nothing(kind: type[Tensor]) -> bool:
    """Whether torch computes with the class as with Tensor: it overrides no call."""
    function = kind.__torch_function__
    inherits = getattr(function, "__func__", function) in (_INHERITED, _DISABLED)
    return inherits and kind.__torch_dispatch__ is Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
