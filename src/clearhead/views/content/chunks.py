"""A header with its chunks: made all at once for a file, or by name for a server or a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from clearhead._core import value_error

__all__ = ["PageContent"]


@dataclass(frozen=True)
class PageContent:
    """The header of a page, and what makes its chunks.

    `makers` are the chunks that a file holds, by name. `asked` answers names with positions in
    them, such as `row/0/3/1/17`, by their first word: these are too many to be made beforehand.
    """

    header: dict[str, Any]
    makers: dict[str, Callable[[], bytes]]
    asked: dict[str, Callable[..., bytes]] = field(default_factory=dict)

    def chunk(self, name: str) -> bytes:
        """Make one chunk; a name that the page does not have is a ValueError."""
        if name in self.makers:
            return self.makers[name]()
        prefix = "other/" if name.startswith("other/") else ""
        word, *numbers = name.removeprefix(prefix).split("/")
        answer = self.asked.get(prefix + word)
        if answer is not None and all(n.isascii() and n.isdecimal() for n in numbers):
            try:
                return answer(*map(int, numbers))
            except (TypeError, LookupError):
                pass
        raise value_error("name", "names a chunk of the page", got=repr(name[:80]))

    def whole(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Make everything that a file holds: the header and all chunks."""
        chunks = {name: make() for name, make in self.makers.items()}
        return {**self.header, "chunks": {name: len(data) for name, data in chunks.items()}}, chunks
