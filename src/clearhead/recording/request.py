"""What a watch reads: the readings, and of which layers, heads, queries and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clearhead._capture import Call
from clearhead._core import numbers, type_error
from clearhead.readings import Reading

__all__ = ["Numbers", "Request"]

Numbers = tuple[int, ...] | None


@dataclass(frozen=True)
class Request:
    """What is read, and of which layers, heads, queries and calls; None is all."""

    read: tuple[Reading, ...]
    single: bool  # whether one reading was given, and not a sequence of them
    layers: Numbers
    heads: Numbers
    queries: Numbers
    calls: Numbers

    @classmethod
    def of(cls, read: Reading | Sequence[Reading], **chosen: Any) -> Request:
        """Check the arguments of `watch`."""
        single = isinstance(read, Reading)
        wanted = (read,) if isinstance(read, Reading) else tuple(read)
        for reading in wanted:
            if not isinstance(reading, Reading):
                raise type_error("read", "takes readings", got=type(reading).__name__)
        return cls(wanted, single, **{name: numbers(name, value) for name, value in chosen.items()})

    @property
    def waits(self) -> bool:
        """Whether records wait until the number of layers is known."""
        return self.layers is not None and min(self.layers) < 0

    def holds_call(self, call: Call) -> bool:
        """Whether the number of a call within its module is requested."""
        return self.calls is None or call.call in self.calls

    def holds_layer(self, layer: int) -> bool:
        """Whether a layer is requested, or may turn out to be one counted from the end."""
        return self.layers is None or layer in self.layers or self.waits

    def layers_of(self, total: int) -> set[int]:
        """Give the requested layers, counted from 0."""
        every = range(total)
        wanted = every if self.layers is None else self.layers
        return {layer % total for layer in wanted if -total <= layer < total}

    def heads_in(self, call: Call) -> list[int]:
        """Give the requested heads that a call has, counted from its own first head."""
        total, here = call.all_heads, call.heads
        if self.heads is None:
            return list(range(len(here)))
        wanted = (head % total for head in self.heads if -total <= head < total)
        return [head - here.start for head in wanted if head in here]

    def queries_of(self, total: int) -> Numbers:
        """Give the requested queries that a call has; None is all."""
        if self.queries is None:
            return None
        return tuple(query for query in self.queries if -total <= query < total)
