"""One training by several processes: the rows of a batch, sums over ranks, and checkpoints."""

from __future__ import annotations

from clearhead.models.ranks.group import ALONE, Group, RefusedByFirst, process_group
from clearhead.models.ranks.sharded import (
    HEADER_FILE,
    is_current,
    read_shards,
    remove_parts_of_shards,
    remove_shards,
    write_shards,
)

__all__ = [
    "ALONE",
    "HEADER_FILE",
    "Group",
    "RefusedByFirst",
    "is_current",
    "process_group",
    "read_shards",
    "remove_parts_of_shards",
    "remove_shards",
    "write_shards",
]
