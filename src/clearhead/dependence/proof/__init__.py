"""How an audit proves: the model, called safely, the plan, the judgement and the place."""

from __future__ import annotations

__all__ = []
