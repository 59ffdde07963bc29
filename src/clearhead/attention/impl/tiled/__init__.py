"""Attention over strips of rows, in torch operations on any device."""

from __future__ import annotations

from clearhead.attention.impl.tiled.tiled import Tiled

__all__ = ["Tiled"]
