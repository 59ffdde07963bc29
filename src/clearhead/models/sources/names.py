"""What may name a model, and the errors for a name that leads to none."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from clearhead._core import value_error

__all__ = ["HUB_ID", "KINDS", "missing_model", "no_model_in"]

# What the name of a model may be.
KINDS = "a directory with a model, a GGUF file, or OWNER/NAME of a model of the hub"
# As the hub names a model, OWNER/NAME; the oldest ones have no owner.
HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")


def missing_model(spec: str, kinds: str = KINDS) -> ValueError:
    """Build the error for a directory or file that does not exist; it suggests similar names."""
    path = Path(spec).expanduser()
    hint = f"give {kinds}"
    if path.parent.is_dir():
        there = {p.name.lower(): p.name for p in path.parent.iterdir() if _holds_model(p)}
        near = difflib.get_close_matches(path.name.lower(), there, n=3)
        if near:
            names = " or ".join(str(path.parent / there[name]) for name in near)
            hint = f"did you mean {names}?"
    return value_error("model", "there is no such file or directory", got=repr(spec), hint=hint)


def no_model_in(spec: str, path: Path) -> ValueError:
    """Build the error for a directory without a model; it suggests models in its directories."""
    inside = sorted(str(p) for p in path.iterdir() if p.is_dir() and _holds_model(p))
    more = f" and {len(inside) - 5} more" if len(inside) > 5 else ""
    hint = "choose one inside of it: " + ", ".join(inside[:5]) + more if inside else (
        "a model is config.json with its weights, or what `clearhead train FILE --out DIR` wrote"
    )  # fmt: skip
    return value_error("model", "the directory holds no model", got=repr(spec), hint=hint)


def _holds_model(path: Path) -> bool:
    if path.suffix == ".gguf":
        return path.is_file()
    try:
        return any((path / name).is_file() for name in ("config.json", "model.safetensors"))
    except OSError:
        return False
