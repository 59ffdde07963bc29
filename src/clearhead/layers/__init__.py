"""`MultiheadAttention`, a drop-in replacement for torch's layer, and `convert` for whole models."""

from __future__ import annotations

from clearhead.layers.conversion import convert
from clearhead.layers.multihead import MultiheadAttention

__all__ = ["MultiheadAttention", "convert"]
