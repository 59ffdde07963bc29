"""A model that a function of the user creates: `package.module:factory`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeGuard

from torch import nn

from clearhead._core import value_error

__all__ = ["from_factory", "is_factory", "model_errors", "refuse_bare_module"]

FORM = "give package.module:factory, where the factory gives a model or (model, inputs)"


def is_factory(spec: str | None) -> TypeGuard[str]:
    """Tell whether a name is `package.module:factory`, and no path that exists."""
    return spec is not None and ":" in spec and not Path(spec).exists()


def from_factory(spec: str) -> tuple[Any, Any]:
    """Import `package.module:factory`, also from the current directory, and call it.

    The result is (model, inputs); inputs are None where the factory gives a model alone.
    """
    made = _called(_imported(spec), spec)
    if not isinstance(made, tuple):
        made = (made, None)
    if len(made) != 2:
        rule = "gives a tuple that is not (model, inputs)"
        raise value_error("model", rule, got=f"{len(made)} things of {spec}", hint=FORM)
    if not callable(made[0]) or isinstance(made[0], type):
        raise value_error("model", f"{spec} gives no model", got=_kind(made[0]), hint=FORM)
    return made


def _imported(spec: str) -> Any:
    home, _, name = spec.partition(":")
    if not (home and name):
        missing = "factory" if home else "module"
        raise value_error("model", f"names no {missing}", got=repr(spec), hint=FORM)
    try:
        with _current_directory(), model_errors(f"importing {home}", ImportError):
            module = import_module(home)
        return getattr(module, name)
    except (ImportError, AttributeError) as error:
        got = f"{spec!r} ({error})"
        rule = "names nothing that can be imported"
        raise value_error("model", rule, got=got, hint=FORM) from error


def _called(made: Any, spec: str) -> Any:
    if isinstance(made, nn.Module):
        return made
    if not callable(made):
        raise value_error("model", "names no function and no model", got=_kind(made), hint=FORM)
    try:
        inspect.signature(made).bind()
    except TypeError as error:
        hint = f"{FORM}; it is called without arguments"
        raise value_error("model", f"{spec} cannot be called: {error}", hint=hint) from None
    except ValueError:
        pass  # some built-in functions have no signature
    with model_errors(spec):
        return made()


def _kind(made: Any) -> str:
    return f"the class {made.__name__}" if isinstance(made, type) else f"a {type(made).__name__}"


@contextmanager
def model_errors(what: str, *passed: type[Exception]) -> Iterator[None]:
    """Convert exceptions of a model's code into a ValueError, except the types `passed`.

    SystemExit too: sys.exit(0) in a model would otherwise look like an audit that passed.
    """
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit, *passed):
        raise
    except SystemExit as error:
        raise value_error("model", f"{what} called sys.exit({error.code!r})") from error
    except BaseException as error:
        words = (str(error).strip().splitlines() or ["without a message"])[0]
        raise value_error("model", f"{what} raised {type(error).__name__}: {words}") from error


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
