"""Functions of torch, other than attention, that move numbers from one position to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["moves_positions"]


def moves_positions(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> bool:
    """Whether a call moves numbers along an axis of `count` positions, which is not the last one.

    Convolutions and pools have their positions last, and move them where they look at several.
    """
    source = args[0] if args else kwargs.get("input")
    if func not in _FUNCTIONS or not isinstance(source, Tensor) or source.ndim < 2:
        return False
    axes = _FUNCTIONS[func](source, args[1:], kwargs)
    return any(0 <= at < source.ndim and source.shape[at] == count for at in axes)


def _along(place: int, *default: int, several: bool = False) -> Callable[..., Iterator[int]]:
    """Make the rule of a function that is given axes; that of the features is left out."""

    def axes(source: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
        given = kwargs.get("dims", kwargs.get("dim", args[place:] or default))
        given = given if isinstance(given, (tuple, list)) else (given,)
        if given and isinstance(given[0], (tuple, list)):
            given = given[0]
        elif not several:
            given = given[:1]
        for at in given:
            if type(at) is int and at % source.ndim != source.ndim - 1:  # True is keepdim
                yield at % source.ndim

    return axes


def _convolved(source: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
    weight: Tensor = kwargs["weight"] if "weight" in kwargs else args[0]
    spatial = weight.ndim - 2
    for at in range(spatial):
        if weight.shape[2 + at] > 1:
            yield source.ndim - spatial + at


def _pooled(source: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
    given = kwargs.get("kernel_size", args[0] if args else 1)
    sizes = (given,) if isinstance(given, int) else given
    yield from (source.ndim - len(sizes) + at for at, size in enumerate(sizes) if size > 1)


def _both(*names: str) -> list[Any]:
    return [getattr(owner, name) for owner in (torch, Tensor) for name in names]


_SUMS = _both("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
_MEANS = _both("mean", "amax", "std", "var")
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv_transpose1d, torch.conv_transpose2d)
_POOLS = (torch.avg_pool1d, F.avg_pool2d, F.max_pool1d, F.max_pool2d)
_FUNCTIONS: dict[Any, Callable[..., Iterator[int]]] = {
    **dict.fromkeys([*_MEANS, *_both("flip")], _along(0, several=True)),
    **dict.fromkeys(_both("roll"), _along(1, several=True)),
    **dict.fromkeys([*_SUMS, *_both("index_select", "gather")], _along(0)),
    **dict.fromkeys(_both("take_along_dim"), _along(1)),
    **dict.fromkeys((torch.fft.fft, torch.fft.ifft), _along(1, -1)),
    **dict.fromkeys((torch.fft.fft2, torch.fft.ifft2), _along(1, -2, -1, several=True)),
    **dict.fromkeys((torch.fft.fftn, torch.fft.ifftn), _along(1, 1, several=True)),
    **dict.fromkeys(_CONVOLUTIONS, _convolved),
    **dict.fromkeys(_POOLS, _pooled),
}
