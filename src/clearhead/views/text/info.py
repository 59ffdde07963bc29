"""What is installed and what it runs on, as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from clearhead.views.terminal import Terminal

__all__ = ["render_info"]


def render_info(facts: dict[str, Any]) -> None:
    """Print the facts as a table of names and values."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name in ("clearhead", "python", "torch", "threads", "machine"):
        table.add_row(Text(name), Text(str(facts[name])))
    for name, state in facts["implementations"].items():
        table.add_row(Text(f"impl {name}"), Text(state))
    for name, version in facts["optional"].items():
        table.add_row(Text(name), Text(version or "not installed"))
    Terminal().print(table)
