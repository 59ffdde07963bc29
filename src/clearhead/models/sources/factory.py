"""A model made by a function of your own: `package.module:factory`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from clearhead._core import value_error
from clearhead.models.sources.inputs import random_tokens

__all__ = ["from_factory", "is_factory", "refuse_bare_module"]


def is_factory(spec: str | None) -> bool:
    """Tell whether a name is `package.module:factory`, and no path that exists."""
    return bool(spec) and ":" in str(spec) and not Path(str(spec)).exists()


def from_factory(spec: str, length: int) -> tuple[Any, Any]:
    """Import `package.module:factory`, also from the current directory, and call it.

    The result is (model, inputs); a factory that gives a model alone gets `length` random tokens.
    """
    home, _, name = spec.partition(":")
    try:
        with _current_directory():
            made = getattr(import_module(home), name)
    except (ImportError, AttributeError) as error:
        raise value_error(
            "model", "names nothing that can be imported", got=repr(spec), hint=str(error)
        ) from error
    made = made if isinstance(made, nn.Module) else made()
    return made if isinstance(made, tuple) else (made, random_tokens(made, length))


def refuse_bare_module(spec: str | None) -> None:
    """Say that a factory is missing where a module is named and no model has that name."""
    if spec is None or not all(map(str.isidentifier, spec.split("."))) or Path(spec).exists():
        return
    try:
        with _current_directory():
            found = find_spec(spec)
    except (ImportError, ValueError):
        return
    if found is not None:
        hint = f"name what makes the model in it, as in {spec}:make"
        raise value_error("model", "is a Python module, and not yet a model", got=spec, hint=hint)


@contextmanager
def _current_directory() -> Iterator[None]:
    """Import from the current directory too, as `python -m` does."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
