"""Fused attention that also returns readings: q, k, v -> context and what was read on the way."""

from __future__ import annotations

from clearhead.attention.api import attend, make_problem
from clearhead.attention.edges import warn_if_backwards
from clearhead.attention.impl import Implementation, available, choose
from clearhead.attention.memory import check_readings, free_bytes
from clearhead.attention.problem import Problem

__all__ = [
    "Implementation",
    "Problem",
    "attend",
    "available",
    "check_readings",
    "choose",
    "free_bytes",
    "make_problem",
    "warn_if_backwards",
]
