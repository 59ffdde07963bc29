"""Prove it: does anything flow outside the edges that a mask allows?"""

from __future__ import annotations

from clearhead.dependence.auditing import Finding, Report, assert_causal, audit
from clearhead.dependence.influencing import influence

__all__ = ["Finding", "Report", "assert_causal", "audit", "influence"]
