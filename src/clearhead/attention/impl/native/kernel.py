"""The compiled module: whether it is there, and what its callers agree on with it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

__all__ = ["CONTRACT", "MISSING", "TYPES", "OutOfRange", "Sparse"]

# As in native/host/kernel.h.
CONTRACT = 4


def _load() -> tuple[Any, str]:
    """The compiled module, or None and why there is none."""
    missing = "no C++ compiler was found when clearhead was installed"
    try:
        found: Any = import_module("clearhead.attention.impl.native._native")
    except ModuleNotFoundError:
        return None, missing
    except ImportError as error:
        return None, f"it was compiled, and does not load: {error}"
    if getattr(found, "contract", None) != CONTRACT:
        return None, (
            "it was built from another version of clearhead: install clearhead again, or run "
            "native/build.sh in a checkout"
        )
    return found, missing


_native, MISSING = _load()

# The dtypes of query, key and value, as the kernel numbers them.
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class OutOfRange(ArithmeticError):
    """The numbers of a call are too large for the kernel, or not finite."""


class Sparse(OutOfRange):
    """The mask of a call has so few edges that the fallback serves it."""
