"""watch(): see the attention calls that a model really makes."""

from __future__ import annotations

from clearhead.recording.records import Record, Seen, load
from clearhead.recording.watching import estimate, watch

__all__ = ["Record", "Seen", "estimate", "load", "watch"]
