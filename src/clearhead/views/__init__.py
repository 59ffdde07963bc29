"""What a person sees: token labels, and the renderers that share them."""

from __future__ import annotations

__all__ = []
