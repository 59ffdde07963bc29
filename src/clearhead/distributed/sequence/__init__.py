"""Attention over positions that are split over ranks: the plan, the walk, and what it computes."""

from __future__ import annotations

from clearhead.distributed.sequence.attending import attend

__all__ = ["attend"]
