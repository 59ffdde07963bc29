"""A rectangle of a larger mask, as the mask of the call that computes this rectangle."""

# The methods are documented once, in EdgeSet and Mask.
# ruff: noqa: D102
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead._core import Sizes
from clearhead.attention import Corner
from clearhead.masks import Block, Mask

__all__ = ["Section"]


class Section(Mask):
    """Some consecutive heads, queries and sources of a mask, counted from 0."""

    def __init__(self, inner: Mask, corner: Corner, heads: int, queries: int, sources: int):
        self.inner, self.corner, self.heads = inner, corner, heads
        self._calls, self._varies = inner._calls, inner.own.head not in (None, 1)
        head = heads if self._varies else inner.own.head
        self.own = inner.own._replace(head=head, query=queries, source=sources)

    def to(self, device: torch.device | str) -> Mask:
        return Section(self.inner.to(device), self.corner, self.heads, *self.own[2:])  # type: ignore[arg-type]

    def tensors(self) -> list[Tensor]:
        return self.inner.tensors()

    def _text(self, full: bool) -> str:
        _, query, source, _ = self.corner
        return f"section({self.inner._text(full)}, query={query}, source={source})"

    def _chosen(self, x: Tensor) -> Tensor:
        """The heads of the section, of an answer for all heads: (..., head, query, ...)."""
        if not self._varies or x.ndim < 3 or x.shape[1] == 1:
            return x
        return x.narrow(1, self.corner.head, self.heads)

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        head, query, source, whole = self.corner
        return self.inner._at(b, h + head, i + query, j + source, whole)

    def _tile(
        self, rows: Tensor, columns: Tensor, sizes: Sizes, within: Tensor | None = None
    ) -> Tensor:
        _, query, source, whole = self.corner
        return self._chosen(self.inner._tile(rows + query, columns + source, whole))

    def _block(self, tile: Any) -> Block:
        _, query, source, whole = self.corner
        return self.inner._block(
            tile._replace(
                top=tile.top + query, bottom=tile.bottom + query, left=tile.left + source,
                right=tile.right + source, query=whole.query, source=whole.source,
            )
        )  # fmt: skip

    def _intervals(self, i: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        found = self.inner._intervals(i + self.corner.query, self.corner.whole)
        return None if found is None else self._moved(found)

    def _ranges(self, i: Tensor, sizes: Sizes, most: int) -> list[tuple[Tensor, Tensor]] | None:
        found = self.inner._ranges(i + self.corner.query, self.corner.whole, most)
        if found is None:
            return None
        moved = [[x.clamp(0, sizes.source) for x in self._moved(pair)] for pair in found]
        return [(start, torch.maximum(start, stop)) for start, stop in moved]

    def _moved(self, interval: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        start, stop = (self._chosen(x) - self.corner.source for x in interval)
        return start, stop

    def sources(self, queries: range, sizes: Sizes) -> Tensor | None:
        _, query, first, whole = self.corner
        found = self.inner.sources(range(queries.start + query, queries.stop + query), whole)
        if found is None:
            return None
        return found[(found >= first) & (found < first + sizes.source)] - first
