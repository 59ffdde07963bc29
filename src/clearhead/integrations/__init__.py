"""Inside other libraries: `transformers`, `lightning`, and pytest by its plugin; imported late."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.integrations import lightning, transformers

__all__ = ["lightning", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'clearhead.integrations' has no attribute {name!r}")
    return import_module(f"clearhead.integrations.{name}")
