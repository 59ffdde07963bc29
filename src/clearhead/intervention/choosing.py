"""Which layers and heads are cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from clearhead._core import is_number, numbers, type_error, value_error

__all__ = ["Chosen", "chosen"]


@dataclass(frozen=True)
class Chosen:
    """Layers and heads by number, or pairs of both; None is all."""

    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    pairs: tuple[tuple[int, int], ...] | None

    def holds(self, layer: int, head: int, total: int) -> bool:
        """Whether this head is chosen; heads may count from the end of the `total` there are."""
        names = (head, head - total)
        if self.pairs is not None:
            return any((layer, name) in self.pairs for name in names)
        if self.layers is not None and layer not in self.layers:
            return False
        return self.heads is None or any(name in self.heads for name in names)

    def check(self, totals: Mapping[int, int], modules: Mapping[int, str]) -> None:
        """Raise where a layer or head was chosen that the run did not have."""
        layers = self.layers if self.pairs is None else tuple(layer for layer, _ in self.pairs)
        missing = sorted({layer for layer in layers or () if layer not in totals})
        if missing:
            known = ", ".join(f"{n} ({modules[n]})" if modules[n] else str(n) for n in totals)
            raise value_error(
                "layers",
                "were not all seen in the block",
                got=missing,
                hint=f"choose among {known}",
            )
        beyond = [
            pair
            for pair in self._asked(totals)
            if not -totals[pair[0]] <= pair[1] < totals[pair[0]]
        ]
        if beyond:
            layer, head = beyond[0]
            rule = f"layer {layer} has the heads 0..{totals[layer] - 1}"
            raise value_error("heads", rule, got=f"head {head}", hint="choose among those")

    def _asked(self, totals: Mapping[int, int]) -> list[tuple[int, int]]:
        if self.pairs is not None:
            return list(self.pairs)
        layers = totals if self.layers is None else self.layers
        return [(layer, head) for layer in layers for head in self.heads or ()]


def chosen(layers: Any, heads: Any) -> Chosen:
    """Read `layers=` and `heads=`: numbers, or (layer, head) pairs."""
    which = numbers("layers", layers)
    if which is not None and min(which) < 0:
        raise value_error(
            "layers",
            "count from 0: how many there are is known only after a run",
            got=list(which),
            hint="see the numbers with watch, whose records have them as record.layer",
        )
    listed: Any = [heads] if isinstance(heads, Integral) or _is_pair(heads) else heads
    listed = list(listed) if isinstance(listed, Iterator) else listed
    if listed is None or not any(_is_pair(head) for head in listed):
        return Chosen(which, numbers("heads", listed), None)
    if which is not None:
        raise value_error(
            "heads", "says the layers itself where it holds pairs", got=f"layers={list(which)}",
            hint="give (layer, head) pairs alone, or layers= and head numbers",
        )  # fmt: skip
    pairs = tuple(_pair(head) for head in listed)
    if min(layer for layer, _ in pairs) < 0:
        raise value_error("heads", "count layers from 0", got=list(pairs))
    return Chosen(None, None, pairs)


def _is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2


def _pair(given: Any) -> tuple[int, int]:
    if not _is_pair(given) or not all(is_number(number) for number in given):
        raise type_error(
            "heads", "takes head numbers or (layer, head) pairs, not both", got=repr(given)
        )
    return int(given[0]), int(given[1])
