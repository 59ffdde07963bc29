"""The attention layer in place of torch's, and `convert` for whole models."""

from __future__ import annotations

from clearhead.layers.multihead import MultiheadAttention, convert

__all__ = ["MultiheadAttention", "convert"]
