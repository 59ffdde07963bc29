"""What all packages share: sizes, active transforms, errors, files and indices."""

from __future__ import annotations

from clearhead._core import errors
from clearhead._core.captured import captured_tensors
from clearhead._core.errors import did_you_mean, is_refusal, type_error, value_error, warn
from clearhead._core.files import link_target, remove_parts, replacing
from clearhead._core.indices import is_number, numbers, position
from clearhead._core.locks import is_file_at, take_lock
from clearhead._core.signals import StopRequests
from clearhead._core.sizes import Sizes
from clearhead._core.transforms import (
    active_transforms,
    has_values,
    is_mapped,
    plain,
    readable,
    traced_transform,
    unobserved,
)

__all__ = [
    "Sizes",
    "StopRequests",
    "active_transforms",
    "captured_tensors",
    "did_you_mean",
    "errors",
    "has_values",
    "is_file_at",
    "is_mapped",
    "is_number",
    "is_refusal",
    "link_target",
    "numbers",
    "plain",
    "position",
    "readable",
    "remove_parts",
    "replacing",
    "take_lock",
    "traced_transform",
    "type_error",
    "unobserved",
    "value_error",
    "warn",
]
