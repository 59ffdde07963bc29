"""Which layers, heads and edges are cut: the arguments of all cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead._core import is_number, numbers, type_error, value_error
from clearhead.masks import Mask, no_mask

__all__ = ["HeadSelection", "Heads", "Model", "as_edges", "is_pair", "listed", "select_heads"]

Model = nn.Module | Callable[..., Any]
Heads = int | tuple[int, int] | Iterable[int] | Iterable[tuple[int, int]] | None


@dataclass(frozen=True)
class HeadSelection:
    """Layers and heads by number, or pairs of both; None is all."""

    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    pairs: tuple[tuple[int, int], ...] | None

    def holds(self, layer: int, head: int, total: int) -> bool:
        """Whether a head is selected; heads may count from the end of the `total` of a layer."""
        names = (head, head - total)
        if self.pairs is not None:
            return any((layer, name) in self.pairs for name in names)
        if self.layers is not None and layer not in self.layers:
            return False
        return self.heads is None or any(name in self.heads for name in names)

    @property
    def whole(self) -> bool:
        """Whether every head of every layer is selected."""
        return self.layers is None and self.heads is None and self.pairs is None

    def listed(self, totals: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
        """The selected heads as (layer, head)."""
        return tuple(
            (layer, head)
            for layer, total in totals.items()
            for head in range(total)
            if self.holds(layer, head, total)
        )

    def check(self, totals: Mapping[int, int], modules: Mapping[int, str]) -> None:
        """Raise where a layer or head was selected that the run did not have."""
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
        for layer, head in self._named(totals):
            if not -totals[layer] <= head < totals[layer]:
                rule = f"layer {layer} has the heads 0..{totals[layer] - 1}"
                raise value_error("heads", rule, got=f"head {head}", hint="choose among those")

    def _named(self, totals: Mapping[int, int]) -> list[tuple[int, int]]:
        if self.pairs is not None:
            return list(self.pairs)
        layers = totals if self.layers is None else self.layers
        return [(layer, head) for layer in layers for head in self.heads or ()]


def select_heads(layers: Any, heads: Any) -> HeadSelection:
    """Read `layers=` and `heads=`: numbers, or (layer, head) pairs."""
    which = numbers("layers", layers)
    if which is not None and min(which) < 0:
        raise value_error(
            "layers",
            "count from 0: their number is known only after a run",
            got=list(which),
            hint="watch(model) lists the numbers: record.layer",
        )
    given: Any = [heads] if isinstance(heads, Integral) or _is_tuple(heads) else heads
    given = list(given) if isinstance(given, Iterator) else given
    if given is None or not any(_is_tuple(head) for head in given):
        return HeadSelection(which, numbers("heads", given), None)
    if which is not None:
        raise value_error(
            "heads", "name their layers themselves as pairs", got=f"layers={list(which)}",
            hint="give (layer, head) pairs alone, or layers= and head numbers",
        )  # fmt: skip
    pairs = tuple(_pair(head) for head in given)
    if min(layer for layer, _ in pairs) < 0:
        raise value_error("heads", "count layers from 0", got=list(pairs))
    return HeadSelection(None, None, pairs)


def _is_tuple(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2


def _pair(given: Any) -> tuple[int, int]:
    if not _is_tuple(given) or not all(is_number(number) for number in given):
        raise type_error(
            "heads", "takes head numbers or (layer, head) pairs, not both", got=repr(given)
        )
    return int(given[0]), int(given[1])


def as_edges(edges: Any) -> Mask:
    """Read `edges=`: a mask, a bool tensor, or (query, source) pairs."""
    if isinstance(edges, Mask):
        return edges
    if isinstance(edges, Tensor) and edges.dtype == torch.bool:
        return masks.dense(edges)
    edges = listed(edges)
    if isinstance(edges, list | tuple):
        # Cuts are in positions of the whole sequence. There both alignments of self-attention are
        # the same, and the queries of cross-attention count from their own start.
        pairs: Any = [edges] if is_pair(edges) else edges
        return masks.edges(pairs, align="start")
    rule = "is a Mask, (query, source) pairs, or a bool tensor: True is cut"
    if isinstance(edges, Tensor):
        got = f"{tuple(edges.shape)} of {edges.dtype}"
        hint = "pairs are an integer tensor of shape (n, 2)"
        raise type_error("edges", rule, got=got, hint=hint)
    raise no_mask("edges", edges, rule)


def listed(edges: Any) -> Any:
    """Make a list of an iterable or of a tensor of pairs; leave anything else as it is."""
    if isinstance(edges, Tensor):
        numbers = edges.dtype != torch.bool and not edges.dtype.is_floating_point
        pairs = numbers and edges.dim() == 2 and edges.shape[1] == 2
        return [tuple(pair) for pair in edges.tolist()] if pairs else edges
    whole = isinstance(edges, str | bytes | dict | tuple) or not isinstance(edges, Iterable)
    return edges if whole else list(edges)


def is_pair(edges: Any) -> bool:
    """Whether this is one (query, source) pair."""
    return len(edges) == 2 and all(is_number(number) for number in edges)
