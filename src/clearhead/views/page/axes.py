"""Which positions the calls of a record run over, and what these are labelled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clearhead._core import Sizes, type_error, value_error

__all__ = ["Axis", "CallPlace", "axes_of", "is_pair"]


@dataclass(frozen=True)
class Axis:
    """Positions that are shown: those of one text, image or other input."""

    name: str
    labels: list[list[str]] | None = None  # one list a sample
    ids: list[list[int]] | None = None  # the tokens' numbers, one list a sample
    raw: list[list[str]] | None = None  # their bytes in hexadecimal, one list a sample
    segments: tuple[tuple[int, int, str], ...] = ()
    prompt: int | None = None  # so many of the positions were given, the others generated
    grid: tuple[int, int] | None = None  # rows and columns of image patches, the last positions

    def entry(self) -> dict[str, Any]:
        """The entry of the header: what is known."""
        known = {name: value for name, value in vars(self).items() if value not in (None, ())}
        return {"name": self.name, "labels": self.labels, **known}


class CallPlace(NamedTuple):
    """A call: "self" or "cross", the module that made it, and its sizes."""

    kind: str
    module: str
    sizes: Sizes


def axes_of(places: Sequence[CallPlace], tokens: Any) -> tuple[list[Axis], list[tuple[int, int]]]:
    """Return the axes of all calls, and for each call those of its queries and of its sources.

    Without cross attention there is one axis, that of the tokens. With it there are two: the
    decoder's tokens ask, and the encoder's are its sources; calls of the encoder run over the
    second alone. `tokens` are labels of the first, or a pair for both.
    """
    crossing = [place for place in places if place.kind == "cross"]
    stacks = {_stack(place.module) for place in crossing}
    at = [_axes(place, crossing, stacks) for place in places]
    batch = max((place.sizes.batch for place in places), default=1)
    own, others = _pair(tokens) if crossing else (tokens, None)
    axes = [
        Axis(
            "tokens", labels_of(own, batch, _length(places, at, 0), "query" if others else "source")
        )
    ]
    if crossing:
        axes.append(Axis("sources", labels_of(others, batch, _length(places, at, 1))))
    return axes, at


def _axes(place: CallPlace, crossing: Sequence[CallPlace], stacks: set[str]) -> tuple[int, int]:
    if place.kind == "cross":
        return 0, 1
    encoder = _stack(place.module) not in stacks
    encodes = any(place.sizes.source == cross.sizes.source for cross in crossing)
    return (1, 1) if encoder and encodes else (0, 0)


def _stack(module: str) -> str:
    """The part of a dotted name before the first number: the stack of layers."""
    parts = module.split(".")
    first = next((at for at, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[:first])


def _length(places: Iterable[CallPlace], at: Iterable[tuple[int, int]], axis: int) -> int:
    found = [0]
    for place, (query, source) in zip(places, at, strict=True):
        found += [place.sizes.source] * (source == axis) + [place.sizes.query] * (query == axis)
    return max(found)


def _pair(tokens: Any) -> tuple[Any, Any]:
    """Labels of queries and of sources, where they are a pair."""
    both = is_pair(tokens)
    return (tokens[0], tokens[1]) if both else (tokens, None)


def is_pair(tokens: Any) -> bool:
    """Whether labels are those of the queries and those of the sources: a tuple of two lists."""
    return isinstance(tokens, tuple) and len(tokens) == 2 and not isinstance(tokens[0], str)


def labels_of(
    tokens: Any, batch: int, length: int, position: str = "source"
) -> list[list[str]] | None:
    """One list of labels a sample, each of `length`; a single list serves all samples."""
    if tokens is None:
        return None
    lists = _lists(tokens, batch)
    if len(lists) != batch or any(len(x) != length for x in lists):
        raise value_error(
            "tokens",
            f"has one label for each {position}, or one list of them for each sample",
            got=f"{len(lists)} lists of {sorted({len(x) for x in lists})} labels",
            shapes={f"(sample, {position})": (batch, length)},
            hint="cross attention takes a pair: (labels of the queries, labels of the sources)",
        )
    return lists


def _lists(tokens: Any, batch: int) -> list[list[str]]:
    try:
        given = list(tokens)
        flat = all(isinstance(x, str) for x in given)
        lists = [given] * batch if flat else [list(x) for x in given]
    except TypeError:
        lists = [[None]]
    if not all(isinstance(label, str) for each in lists for label in each):
        hint = "of token ids: tokenizer.convert_ids_to_tokens(ids)"
        rule = "is a list of strings, or one list of them for each sample"
        raise type_error("tokens", rule, got=f"{tokens!r:.60}", hint=hint)
    return [[str(label) for label in each] for each in lists]
