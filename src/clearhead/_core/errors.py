"""The form of every error: the argument, the rule, what was got, the shapes, what to do."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

__all__ = ["did_you_mean", "is_refusal", "type_error", "value_error", "warn"]

_Error = TypeVar("_Error", ValueError, TypeError)


def value_error(argument: str, rule: str, **parts: Any) -> ValueError:
    """Build the ValueError for an argument whose value or shape breaks a rule.

    >>> print(value_error("key", "needs as many features as query", got="8",
    ...                   shapes={"query": (2, 5, 4), "key": (2, 5, 8)}, hint="project key first"))
    key: needs as many features as query; got 8
      query  (2, 5, 4)
      key    (2, 5, 8)
      to do: project key first

    `got` is what was passed, `shapes` maps names to shapes (or tensors), `hint` is what to do.
    """
    return _of_argument(argument, ValueError(_message(argument, rule, **parts)))


def type_error(argument: str, rule: str, **parts: Any) -> TypeError:
    """Build the TypeError for an argument of a wrong type or dtype; parts as in `value_error`."""
    return _of_argument(argument, TypeError(_message(argument, rule, **parts)))


def is_refusal(error: BaseException) -> bool:
    """Whether an error was built here, about an argument of the user's."""
    return hasattr(error, "argument")


def _of_argument(argument: str, error: _Error) -> _Error:
    setattr(error, "argument", argument)  # noqa: B010  (an error declares no attributes)
    return error


def warn(argument: str, rule: str, **parts: Any) -> None:
    """Warn of an argument that is legal but rarely intended, at the line that called the library.

    Parts as in `value_error`. Python shows a warning once for each line that causes it.
    """
    level, frame = 1, sys._getframe()
    # The frames in between belong to the library itself and to torch's modules.
    while frame and str(frame.f_globals.get("__name__")).startswith(("clearhead.", "torch.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(_message(argument, rule, **parts), UserWarning, stacklevel=level)


def did_you_mean(names: str) -> str:
    """Return the end of an error's sentence that suggests names; empty without names."""
    return f"; did you mean {names}?" if names else ""


def _message(
    argument: str,
    rule: str,
    *,
    got: object = None,
    shapes: Mapping[str, Any] | None = None,
    hint: str | None = None,
) -> str:
    lines = [f"{argument}: {rule}" + (f"; got {got}" if got is not None else "")]
    shapes = {name: shape for name, shape in (shapes or {}).items() if shape is not None}
    width = max(map(len, shapes), default=0)
    lines += [f"  {name:<{width}}  {_shape(shape)}" for name, shape in shapes.items()]
    if hint:
        lines.append(f"  to do: {hint}")
    return "\n".join(lines)


def _shape(value: Any) -> str:
    shape = tuple(getattr(value, "shape", value))
    # None is a size that fits every size.
    return str(shape).replace("None", "any")
