"""watch(): see the attention calls that a model really makes."""

from __future__ import annotations

from clearhead.recording.watching import Record, Seen, estimate, load, watch

__all__ = ["Record", "Seen", "estimate", "load", "watch"]
