"""The compiled CPU kernel."""

from __future__ import annotations

from clearhead.attention.impl.native.entry import Native

__all__ = ["Native"]
