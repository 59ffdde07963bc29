"""What `effects` cuts one after the other: edges, sources, or whole heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clearhead import masks
from clearhead._core import is_number, type_error, value_error
from clearhead.intervention.cuts import Cut, EdgeCut
from clearhead.intervention.outputs import Ablation
from clearhead.intervention.selection import HeadSelection, as_edges, is_pair
from clearhead.masks import Mask

__all__ = ["Candidate", "candidates", "several"]


@dataclass(frozen=True)
class Candidate:
    """Something to cut: edges, or whole heads where there are none."""

    name: Any
    edges: Mask | None
    where: HeadSelection

    def cut(self, samples: slice) -> Cut:
        """Make the cut, in some samples of a batch."""
        if self.edges is None:
            return Ablation("zero", None, 0, self.where, samples)
        return EdgeCut(self.edges, self.where, samples)


def candidates(
    edges: Any, sources: Any, where: HeadSelection, totals: dict[int, int]
) -> list[Candidate]:
    """List what is cut: each of several edges, each source, or each of the selected heads."""
    if edges is not None and sources is not None:
        raise value_error("edges", "and sources exclude each other", hint="call effects twice")
    if sources is not None:
        listed = [_position("sources", source) for source in sources]
        return _some("sources", [Candidate(source, _column(source), where) for source in listed])
    if edges is not None and several(edges):
        named = [(_name(edge), _mask_of(edge)) for edge in edges]
        return _some("edges", [Candidate(name, mask, where) for name, mask in named])
    mask = None if edges is None else _mask_of(edges)
    pairs = where.listed(totals)
    return [Candidate(pair, mask, HeadSelection(None, None, (pair,))) for pair in pairs]


def _some(argument: str, found: list[Candidate]) -> list[Candidate]:
    if not found:
        raise value_error(argument, "needs at least one thing to cut", got="none")
    return found


def several(edges: Any) -> bool:
    """Whether these are edges to cut one after the other, and not one mask or pair."""
    return isinstance(edges, list) or (isinstance(edges, tuple) and not is_pair(edges))


def _name(edge: Any) -> Any:
    return tuple(edge) if isinstance(edge, (tuple, list)) else edge


def _mask_of(edge: Any) -> Mask:
    if isinstance(edge, (Mask, Tensor, str)) or callable(edge):
        return as_edges(edge)
    if not isinstance(edge, (tuple, list)) or len(edge) != 2:
        raise type_error("edges", "takes (query, source) pairs or masks", got=repr(edge))
    for number in edge:
        _position("edges", number)
    return as_edges([edge])


def _position(argument: str, number: Any) -> int:
    if not is_number(number):
        raise type_error(argument, "takes positions", got=repr(number))
    if number < 0:
        raise value_error(argument, "takes positions counted from 0", got=number)
    return int(number)


def _column(source: int) -> Mask:
    return masks.where(lambda b, h, i, j: (j == source) & (i != source))
