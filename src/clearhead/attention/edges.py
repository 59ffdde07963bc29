"""What blocks edges or adds to scores: the mask and the bias, checked against the sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead import masks
from clearhead._core import active_transforms, type_error, value_error, warn
from clearhead.attention.checks import floats, same_device
from clearhead.attention.problem import sizes_of
from clearhead.masks import MAY_ATTEND, Mask, no_mask, only_ones_and_zeros

__all__ = ["bias", "check_shape", "mask", "warn_if_backwards"]


def mask(given: Any, passed: Tensor, query: Tensor, key: Tensor) -> Mask:
    """Return the mask as a `Mask` whose sizes fit.

    `passed` is query as the caller passed it; query and key have a head axis.
    """
    if isinstance(given, Mask):
        given.check(sizes_of(query, key))
        return given
    if not isinstance(given, Tensor):
        raise no_mask("mask", given)
    if given.dtype != torch.bool:
        raise _no_bool(given)
    same_device("mask", given, query)
    whole = _with_head("mask", given, passed, key)
    warn_if_backwards(given)
    return masks.dense(_flat_batch(whole, query, key))


def warn_if_backwards(given: Tensor) -> None:
    """Warn of a bool mask by which each query reads only what lies after it.

    A causal mask in which True means "blocked" looks like this. Only a few rows are examined, and
    only where that does not synchronize with a device.
    """
    size = given.shape[-1] if given.ndim > 1 else 0
    if size < 2 or given.shape[-2] != size or not _at_hand(given) or _corner(given):
        return
    edges = given[(0,) * (given.ndim - 2)]
    if not edges[0, 1:].all() or edges[-1].any():
        return
    if edges.diagonal().any() or not edges.diagonal(1).all() or edges.diagonal(-1).any():
        return
    warn(
        "mask",
        "by it each query reads only what lies after it: True means that it may attend",
        shapes={"mask": given},
        hint="~mask, or masks.from_multihead(mask), where True meant blocked; "
        "~masks.causal() where this is meant",
    )


def _at_hand(given: Tensor) -> bool:
    """Whether the stored values can be examined now, without waiting for a device."""
    plain = type(given) in (Tensor, torch.nn.Parameter) and given.is_cpu and given.numel() > 0
    return plain and not active_transforms()


def _corner(given: Tensor) -> float:
    """Return the first element in one step, because every call asks for it."""
    return given.as_strided((), ()).item()


def _no_bool(given: Tensor) -> TypeError:
    if only_ones_and_zeros(given):
        hint = "mask.bool() if 1 means may attend, ~mask.bool() if 1 means blocked"
    elif given.is_floating_point():
        hint = "pass it as bias= to add it to the scores; masks.from_additive reads a 0/-inf mask"
    else:
        hint = "say which number means may attend, for example mask == 1"
    return type_error(
        "mask",
        MAY_ATTEND,
        got=str(given.dtype).replace("torch.", ""),
        shapes={"mask": given},
        hint=hint,
    )


def bias(given: Any, passed: Tensor, key: Tensor) -> Tensor:
    """Return the bias with a head axis where it has one to broadcast over."""
    floats("bias", given, "a bool tensor of edges belongs into mask=")
    same_device("bias", given, passed)
    _warn_of_disguise(given)
    return _with_head("bias", given, passed, key)


def _warn_of_disguise(given: Tensor) -> None:
    """Warn of a bias of zeros and ones, which blocks nothing; a learned one may hold anything."""
    if given.requires_grad or not _at_hand(given) or _corner(given) not in (0, 1):
        return
    low, high = torch.aminmax(given.detach())
    if low == 0 and high == 1 and only_ones_and_zeros(given):
        warn(
            "bias",
            "of zeros and ones adds 1 to some scores, and blocks nothing",
            shapes={"bias": given},
            hint="mask=bias.bool() if 1 means may attend, mask=~bias.bool() if 1 means blocked",
        )


def _with_head(name: str, given: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Check that the tensor broadcasts to the scores, and put in the head axis of 3-D inputs."""
    check_shape(name, given, query, key)
    return given.unsqueeze(-3) if query.ndim == 3 and given.ndim == 3 else given


def check_shape(name: str, given: Tensor, query: Tensor, key: Tensor) -> None:
    """Check that a mask or bias broadcasts to the scores."""
    target = (*query.shape[:-1], key.shape[-2])
    shape = tuple(given.shape)
    at = len(target) - len(shape)
    if at < 0 or any(size not in (1, full) for size, full in zip(shape, target[at:], strict=True)):
        axes = {2: "(query, source)", 3: "(batch, query, source)"}
        raise value_error(
            name,
            f"broadcasts to {axes.get(len(target), '(*batch, head, query, source)')}",
            shapes={name: shape, "scores": target, "query": query},
            hint=_fitting(given, target),
        )


def _fitting(given: Tensor, target: tuple[int, ...]) -> str:
    rows = len(target) > 2 and tuple(given.shape) == (target[0], target[-1])
    if rows and given.dtype == torch.bool:
        return (
            "masks.keep(mask) takes (batch, source), True = real; a tensor of one row for "
            "each sample needs axes of 1 for heads and queries"
        )
    return (
        "make each axis 1 or the size of the scores; a mask of one row for each sample needs axes "
        "of 1 for heads and queries, or masks.keep(real)"
    )


def _flat_batch(whole: Tensor, queries: Tensor, key: Tensor) -> Tensor:
    """Return (query, source) or (batch or 1, head or 1, query, source), as masks know them."""
    query, source = queries.shape[-2], key.shape[-2]
    if whole.ndim < 3:
        return whole.expand(query, source)
    whole = whole.expand(*whole.shape[:-2], query, source)
    if whole.ndim == 3:
        return whole.unsqueeze(0)
    if all(size == 1 for size in whole.shape[:-3]):
        return whole.reshape(1, *whole.shape[-3:])
    return whole.expand(*queries.shape[:-3], *whole.shape[-3:]).flatten(0, -4)
