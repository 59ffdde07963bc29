"""The mask of sources that the layer itself appends: `add_bias_kv` and `add_zero_attn`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.masks import Block, Mask

if TYPE_CHECKING:
    from clearhead._core import Sizes

__all__ = ["AppendedSources"]


class AppendedSources(Mask):
    """A mask over the inputs' sources; every query may also attend to the appended ones."""

    def __init__(self, inner: Mask, extra: int):
        self.inner, self.extra = inner, extra
        source = inner.own.source
        self.own = inner.own._replace(source=None if source is None else source + extra)
        self._calls = inner._calls

    def to(self, device: torch.device | str) -> Mask:
        """Move the tensors of the mask to a device."""
        return AppendedSources(self.inner.to(device), self.extra)

    def check(self, sizes: Sizes) -> None:
        """Check that the mask fits the sizes without the appended sources."""
        self.inner.check(self._before(sizes))

    def _before(self, sizes: Sizes) -> Sizes:
        return sizes._replace(source=sizes.source - self.extra)

    def _text(self, full: bool) -> str:
        return f"appended({self.inner._text(full)}, {self.extra})"

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        before = self._before(sizes)
        if before.source == 0:
            return (i == i) & (j == j)
        inside = self.inner._at(b, h, i, j.clamp(max=before.source - 1), before)
        return inside | (j >= before.source)

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        before, added = self._before(sizes), columns >= sizes.source - self.extra
        if before.source == 0:
            return added.expand(len(rows), -1)
        within = None if within is None else within & ~added
        return self.inner._tile(rows, columns.clamp(max=before.source - 1), before, within) | added

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        before = source - self.extra
        if left >= before:
            return Block.FULL
        inside = self.inner._block(top, bottom, left, min(right, before), query, before)
        return inside if right <= before or inside == Block.FULL else Block.PARTIAL
