"""The compiled CPU kernel."""

from __future__ import annotations

__all__ = []
