"""Inside other libraries: `transformers`, and pytest by its plugin; imported at the first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.integrations import transformers

__all__ = ["transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'clearhead.integrations' has no attribute {name!r}")
    return import_module(f"clearhead.integrations.{name}")
