"""Fused attention that also returns readings: q, k, v -> context and what was read on the way."""

from __future__ import annotations

from clearhead.attention.api import attend, make_problem, without_head
from clearhead.attention.checks import inputs as check_inputs
from clearhead.attention.checks import wanted
from clearhead.attention.edges import warn_if_backwards
from clearhead.attention.impl import (
    Implementation,
    attend_part,
    available,
    choose,
    part_grad,
    part_gradient,
    parts,
    parts_gradient,
)
from clearhead.attention.impl.dropout import draw_seed
from clearhead.attention.memory import check_fit, check_readings, free_bytes
from clearhead.attention.problem import Corner, Problem

__all__ = [
    "Corner",
    "Implementation",
    "Problem",
    "attend",
    "attend_part",
    "available",
    "check_fit",
    "check_inputs",
    "check_readings",
    "choose",
    "draw_seed",
    "free_bytes",
    "make_problem",
    "part_grad",
    "part_gradient",
    "parts",
    "parts_gradient",
    "wanted",
    "warn_if_backwards",
    "without_head",
]
