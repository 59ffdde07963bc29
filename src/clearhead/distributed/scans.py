"""A scan by several processes: each counts a shard of the corpus, the first one merges them."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from clearhead.heads.corpus import merge

__all__ = ["of_torchrun", "scan_in_shards"]

# How long a process waits for the others to finish their shards: torchrun ends it where one fails.
PATIENCE = timedelta(days=30)


def of_torchrun() -> tuple[int, int] | None:
    """Return the number of this process and how many there are; None without torchrun."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" not in os.environ or world < 2:
        return None
    return int(os.environ["RANK"]), world


def scan_in_shards(
    target: Path, rank: tuple[int, int], scan: Callable[[str, Path, bool], int]
) -> int:
    """Scan the shard of this process into a file beside the table; process 0 merges all of them.

    `scan(shard, file, again)` returns an exit code; `again` says that torchrun has started all
    processes once more because one was lost, and each goes on where it was.
    """
    number, world = rank
    files = [target.with_name(f"{target.name}.shard-{k}-of-{world}") for k in range(1, world + 1)]
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    code = scan(f"{number + 1}/{world}", files[number], again)
    if code:
        return code
    _wait_for_all()
    if number == 0:
        merge(files, target)
        for file in files:
            file.unlink()
    return 0


def _wait_for_all() -> None:
    """Return when every process has finished its shard: a group needs all of them."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=PATIENCE)
    dist.destroy_process_group()
