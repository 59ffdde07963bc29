"""One JSON document of what a command found."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["document"]


def document(found: Any) -> str:
    """Write the document; JSON has no NaN and no inf, they become null."""
    return json.dumps(_plain(found), indent=2, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
