"""What is seen of a model that is split over ranks: each rank's share, and these joined."""

from __future__ import annotations

from clearhead.distributed.gathering.calls import observed
from clearhead.distributed.gathering.transfer import gather

__all__ = ["gather", "observed"]
