"""How an audit proves: plan, search, verdict, narrowing, localization, and comparison of runs."""

from __future__ import annotations

from clearhead.dependence.proof.axes import check_axes
from clearhead.dependence.proof.comparison import Comparison, RowGap, compare
from clearhead.dependence.proof.localization import ModuleCall, trace_modules
from clearhead.dependence.proof.nondeterminism import Repeatability, check_repeatability
from clearhead.dependence.proof.suspects import Search, Suspect, run_plan, search
from clearhead.dependence.proof.verdict import decide

__all__ = [
    "Comparison",
    "ModuleCall",
    "Repeatability",
    "RowGap",
    "Search",
    "Suspect",
    "check_axes",
    "check_repeatability",
    "compare",
    "decide",
    "run_plan",
    "search",
    "trace_modules",
]
