"""The mask that asks a function of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core import type_error, value_error
from clearhead.masks.mask import Mask, readable

if TYPE_CHECKING:
    from clearhead._core import Sizes


class Where(Mask):
    """The edges for which a function says True."""

    _made_of = ("function",)
    _calls = True

    def __init__(self, function: Callable[..., Tensor]):
        self.function = function

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        answer = self.function(b, h, i, j)
        if isinstance(answer, bool):
            answer = torch.full_like(i, answer, dtype=torch.bool)
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
            kind = answer.dtype if isinstance(answer, Tensor) else type(answer).__name__
            raise type_error(
                "function", "returns True or False for one edge, as a bool tensor", got=kind
            )
        return answer

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        shape = (sizes.batch, sizes.head, rows.shape[0], columns.shape[0])
        if not all(shape):
            return torch.zeros(shape[2:], dtype=torch.bool, device=rows.device)
        i, j = rows[:, None].expand(shape[2:]), columns.expand(shape[2:])
        if within is not None:
            return self._select(i, j, sizes, within)
        return _narrow(self._map(i, j, sizes, shared=True))

    def _select(self, i: Tensor, j: Tensor, sizes: Sizes, within: Tensor) -> Tensor:
        """Ask about edges in `within` only: the others repeat one of them, and are dropped."""
        if readable(within) and not within.any():
            return within
        if within.dim() == 4:
            i, j = (x.expand(sizes.batch, sizes.head, *x.shape) for x in (i, j))
            within = within.expand_as(i)
            one = within.flatten(-2).to(torch.uint8).argmax(-1)[..., None]
            some = within.flatten(-2).any(-1)[..., None, None]
            i, j = (
                torch.where(within, x, x.flatten(-2).gather(-1, one)[..., None]) for x in (i, j)
            )
            # A sample without any edge borrows one from another sample.
            flat = within.flatten().to(torch.uint8).argmax()[None]
            i, j = (torch.where(some, x, x.flatten().gather(0, flat)) for x in (i, j))
            return self._map(i, j, sizes, shared=False) & within
        one = within.flatten().to(torch.uint8).argmax()[None]
        i, j = (torch.where(within, x, x.flatten().gather(0, one)) for x in (i, j))
        return _narrow(self._map(i, j, sizes, shared=True)) & within

    def _map(self, i: Tensor, j: Tensor, sizes: Sizes, *, shared: bool) -> Tensor:
        """Ask about one edge at a time, as FlexAttention does; positions may differ by sample."""
        ask = torch.vmap(torch.vmap(self._ask(sizes), (None, None, 0, 0)), (None, None, 0, 0))
        place = None if shared else 0
        ask = torch.vmap(torch.vmap(ask, (None, 0, place, place)), (0, None, place, place))
        b = torch.arange(sizes.batch, device=i.device)
        return ask(b, torch.arange(sizes.head, device=i.device), i, j)

    def _ask(self, sizes: Sizes) -> Callable[..., Tensor]:
        def ask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            try:
                return self._at(b, h, i, j, sizes)
            except IndexError as error:
                raise value_error(
                    "function",
                    f"{self._short()} reads beyond its own data ({error})",
                    shapes={"(query, source)": (sizes.query, sizes.source)},
                    hint="block those edges by another mask: causal() & where(function) asks about "
                    "allowed edges only",
                ) from error

        return ask

    def _text(self, full: bool) -> str:
        return f"where({getattr(self.function, '__name__', type(self.function).__name__)})"

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        b_, h_, i_, j_ = (torch.tensor(x) for x in (b, h, i, j))
        return f"the function says {bool(self._at(b_, h_, i_, j_, sizes))}"


def _narrow(edges: Tensor) -> Tensor:
    """Drop the batch and head axes along which a mapped function gave one answer (stride 0)."""
    for axis in (0, 1):
        if edges.shape[axis] > 1 and edges.stride(axis) == 0:
            edges = edges.narrow(axis, 0, 1)
    return edges[0, 0] if edges.shape[:2] == (1, 1) else edges
