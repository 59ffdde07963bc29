"""The calls of one forward, added up: those that are alike together."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from clearhead._capture import FusedCall
from clearhead._core import unobserved
from clearhead.monitoring.rows import Counted
from clearhead.monitoring.statistics import QueryNumbers, of_calls

__all__ = ["CallSums", "Packs"]

# Numbers of queries that wait for further calls that are alike: a MiB of float32.
_WAITING = 1 << 18


class CallSums(NamedTuple):
    """Of calls of some layers the largest score of each head, and sums over its queries."""

    layers: list[int]
    heads: range  # their numbers: under tensor parallelism other ranks hold the others
    most: Tensor  # (call, head)
    sums: Tensor  # (call, head, statistic but the first)


class _Alike(NamedTuple):
    """Calls whose numbers have one shape and one mask."""

    layers: list[int]
    found: list[QueryNumbers]
    rows: Counted
    kind: str
    heads: range


class Packs:
    """Numbers of queries until they are summed: of small calls those of all layers at once."""

    def __init__(self) -> None:
        self._waiting: dict[tuple, _Alike] = {}
        self._summed: list[CallSums] = []

    def add(self, layer: int, call: FusedCall, found: QueryNumbers, rows: Counted) -> None:
        """Add a call of a kernel."""
        most, first = found.most, found.first
        shapes = most.shape, first.shape, most.dtype, most.device
        key = (*shapes, found.scale, call.kind, call.heads, id(rows))
        alike = self._waiting.get(key)
        if alike is None:
            alike = self._waiting[key] = _Alike([], [], rows, call.kind, call.heads)
        alike.layers.append(layer)
        alike.found.append(found)
        if len(alike.found) * (5 * most.numel() + first.numel()) >= _WAITING:
            self._sum(key)

    def add_sums(self, layer: int, heads: range, most: Tensor, sums: Tensor) -> None:
        """Add the sums of one call."""
        self._summed.append(CallSums([layer], heads, most, sums))

    def take(self) -> list[CallSums]:
        """Give the sums of all calls, and begin anew."""
        for key in list(self._waiting):
            self._sum(key)
        found, self._summed = self._summed, []
        return found

    def _sum(self, key: tuple) -> None:
        layers, found, rows, kind, heads = self._waiting.pop(key)
        with unobserved(found[0].most):
            self._summed.append(CallSums(layers, heads, *of_calls(found, rows, kind)))
