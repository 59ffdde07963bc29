"""Prove it: does anything flow outside the edges that a mask allows?"""

from __future__ import annotations

from clearhead.dependence.auditing import assert_causal, audit
from clearhead.dependence.influencing import influence
from clearhead.dependence.options import read_ids
from clearhead.dependence.report import Finding, Report

__all__ = ["Finding", "Report", "assert_causal", "audit", "influence", "read_ids"]
