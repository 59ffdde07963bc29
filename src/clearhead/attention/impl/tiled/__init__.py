"""Attention over strips of rows, on any device."""

from __future__ import annotations

__all__ = []
