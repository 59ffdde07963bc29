"""The records of a model that is split over ranks: each rank's share, joined to the whole."""

from __future__ import annotations

from clearhead.distributed.gathering.transfer import gather

__all__ = ["gather"]
