"""The one place that draws on the terminal: what does not fit, and closed pipes."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Terminal"]


class Terminal(Console):
    """A console that cuts nothing off, pads no line in a pipe, and lets a closed pipe be known."""

    def __init__(self) -> None:
        super().__init__(file=sys.stdout, highlight=False)

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
