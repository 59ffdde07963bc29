"""The mask that lists its edges one by one."""

# The methods are documented once, in Mask.
# ruff: noqa: D102
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core import is_number, type_error, value_error
from clearhead.masks.data import SHOWN
from clearhead.masks.mask import Block, Mask
from clearhead.masks.positional import Align, named_align, read_align, standing

if TYPE_CHECKING:
    from clearhead._core import Sizes

# Two positions below this are one int64.
LIMIT = 1 << 31
HINT = "one edge is edges([(3, 0)]): query 3 reads source 0; dense(tensor) takes a bool tensor"


class Edges(Mask):
    """The edges of a list, in positions of the sequence."""

    _made_of = ("codes", "align")

    def __init__(self, pairs: list[tuple[int, int]], align: Align):
        self.pairs = pairs  # ascending, each once
        self.last = pairs[-1][0], max(source for _, source in pairs)
        self.align: Align = align
        self.codes = torch.tensor([query * LIMIT + source for query, source in pairs])

    def to(self, device: torch.device | str) -> Mask:
        moved = Edges(self.pairs, self.align)
        moved.codes = self.codes.to(device)
        return moved

    def check(self, sizes: Sizes) -> None:
        stop = sizes.query + standing(self.align, sizes.query, sizes.source)
        if self.last[0] < stop and self.last[1] < sizes.source:
            return
        for query, source in self.pairs:
            if query >= stop or source >= sizes.source:
                raise value_error(
                    "mask",
                    f"edges: ({query}, {source}) lies beyond the positions of the call",
                    got=f"queries up to {stop - 1}, sources up to {sizes.source - 1}",
                    shapes={"call (query, source)": (sizes.query, sizes.source)},
                    hint="positions count from 0, query first",
                )

    def _least(self) -> int:
        return 1 + max(self.last)

    def _at(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Tensor:
        asked = (i + standing(self.align, sizes.query, sizes.source)) * LIMIT + j
        codes = self.codes.to(j.device)
        found = torch.searchsorted(codes, asked).clamp(max=len(self.pairs) - 1)
        return codes[found] == asked

    def _text(self, full: bool) -> str:
        few = 2 * len(self.pairs) <= SHOWN
        listed = str(self.pairs) if few else f"<{len(self.pairs)} pairs>"
        return f"edges({listed}{named_align(self.align, full)})"

    def _block(
        self, top: int, bottom: int, left: int, right: int, query: int, source: int
    ) -> Block:
        offset = standing(self.align, query, source)
        rows = (bisect_left(self.pairs, (row + offset, 0)) for row in (top, bottom))
        inside = sum(left <= source < right for _, source in self.pairs[slice(*rows)])
        if not inside:
            return Block.EMPTY
        return Block.FULL if inside == (bottom - top) * (right - left) else Block.PARTIAL

    def _intervals(self, i: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        first: dict[int, int] = {}
        stop: dict[int, int] = {}
        for query, source in self.pairs:
            if stop.get(query, source) != source:
                return None
            first.setdefault(query, source)
            stop[query] = source + 1
        known, low, high = (
            torch.tensor([*values], device=i.device)
            for values in (first, first.values(), stop.values())
        )
        asked = i + standing(self.align, sizes.query, sizes.source)
        at = torch.searchsorted(known, asked).clamp(max=len(first) - 1)
        there = known[at] == asked
        return torch.where(there, low[at], 0), torch.where(there, high[at], 0)

    def _reason(self, b: int, h: int, i: int, j: int, sizes: Sizes) -> str:
        at = i + standing(self.align, sizes.query, sizes.source)
        count = f"{len(self.pairs)} edge{'s' * (len(self.pairs) > 1)}"
        return f"({at}, {j}) is {'' if (at, j) in self.pairs else 'not '}among its {count}"


def edges(pairs: Iterable[tuple[int, int]], align: Align = "end") -> Mask:
    """Exactly these edges: (query, source) pairs, in positions of the whole sequence.

    >>> print(edges([(3, 0), (3, 1)]).picture(4))
      0 1 2 3
    0 · · · ·
    1 · · · ·
    2 · · · ·
    3 ■ ■ · ·
    >>> edges([(3, 0)]).row(0, query=1, source=4)  # one step with a cache: its query is number 3
    [0]

    Positions count from 0. Queries that an earlier step of a cache had are no edges of the call;
    positions beyond it are a ValueError. `align` as in `causal`; in cross-attention, whose queries
    count by themselves, it is "start".
    """
    found = sorted({_pair(pair) for pair in _listed(pairs)})
    if not found:
        raise value_error("pairs", "needs an edge", got="none", hint="nothing() has no edge")
    return Edges(found, read_align(align))


def _listed(pairs: Any) -> list[Any]:
    if isinstance(pairs, Tensor) and pairs.dim() == 2:
        return pairs.tolist()
    if isinstance(pairs, str | bytes | Tensor | dict) or not isinstance(pairs, Iterable):
        got = f"shape {tuple(pairs.shape)}" if isinstance(pairs, Tensor) else repr(pairs)
        raise type_error("pairs", "is a list of (query, source) pairs", got=got, hint=HINT)
    return list(pairs)


def _pair(pair: Any) -> tuple[int, int]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise type_error("pairs", "is a list of (query, source) pairs", got=repr(pair), hint=HINT)
    for number in pair:
        if not is_number(number):
            raise type_error("pairs", "holds positions, as integers", got=repr(tuple(pair)))
        if not 0 <= int(number) < LIMIT:
            hint = "how many positions there are is not known here, so none counts from the end"
            rule = f"holds positions counted from 0, up to {LIMIT - 1}"
            raise value_error("pairs", rule, got=tuple(pair), hint=hint)
    return int(pair[0]), int(pair[1])
