"""One fused attention that also answers: q, k, v -> context, and what was read on the way."""

from __future__ import annotations

from clearhead.attention import api, checks, impl
from clearhead.attention.api import attend
from clearhead.attention.checks import free_bytes, warn_if_backwards
from clearhead.attention.impl import available
from clearhead.attention.problem import Problem

__all__ = [
    "Problem",
    "api",
    "attend",
    "available",
    "checks",
    "free_bytes",
    "impl",
    "warn_if_backwards",
]
