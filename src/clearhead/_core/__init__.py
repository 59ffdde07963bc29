"""What all packages share: sizes, active transforms, errors, files and indices."""

from __future__ import annotations

from clearhead._core import errors
from clearhead._core.errors import did_you_mean, type_error, value_error, warn
from clearhead._core.files import replacing
from clearhead._core.indices import is_number, numbers, position
from clearhead._core.signals import stop_requests
from clearhead._core.sizes import Sizes
from clearhead._core.transforms import active_transforms, readable

__all__ = [
    "Sizes",
    "active_transforms",
    "did_you_mean",
    "errors",
    "is_number",
    "numbers",
    "position",
    "readable",
    "replacing",
    "stop_requests",
    "type_error",
    "value_error",
    "warn",
]
