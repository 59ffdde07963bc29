"""The console of all renderers: escapes, widths and closed pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.table import Table

from clearhead.views.labels import visible

__all__ = ["Terminal"]


class Terminal(Console):
    """A console that crops nothing, pads no line in a pipe, and escapes control characters."""

    def __init__(self, *, stderr: bool = False) -> None:
        file = sys.stderr if stderr else sys.stdout
        file = getattr(file, "unescaped", file)
        super().__init__(file=file, highlight=False, _environ=_environment())

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Render; on a terminal the control characters of data are escaped."""
        segments = super().render(renderable, options)
        if not self.is_terminal:
            return segments
        return (
            segment if segment.control else Segment(visible(segment.text), segment.style)
            for segment in segments
        )

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a table wider than the terminal keeps its width, and the terminal wraps it."""
        for table in objects:
            if isinstance(table, Table):
                needs = self.measure(table, options=self.options.update(width=10_000))
                whole = all(column.no_wrap for column in table.columns)
                least = needs.maximum if whole else needs.minimum
                if least > self.width:
                    table.width, options["crop"] = least, False
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("\n".join(line.rstrip(" ") for line in captured.get().split("\n")))

    def on_broken_pipe(self) -> None:
        """Leave it to the command's one place for errors, where rich would exit with 1."""
        raise BrokenPipeError


def _environment() -> dict[str, str]:
    """Drop a size of 0 from the environment: rich would draw nothing."""
    sizes = ("COLUMNS", "LINES")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in sizes or (value.isascii() and value.strip("0"))
    }
