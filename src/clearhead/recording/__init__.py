"""watch(): see the attention calls that a model really makes."""

from __future__ import annotations

from clearhead.recording.records import Record, Seen, load, outlined, restored
from clearhead.recording.shares import Share
from clearhead.recording.watching import estimate, watch

__all__ = ["Record", "Seen", "Share", "estimate", "load", "outlined", "restored", "watch"]
