"""`torchrun -m clearhead scan`: each process scans a shard, the first one merges them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from clearhead._core import value_error

__all__ = ["of_torchrun", "scan"]

# How long a process waits for the others to finish their shards: torchrun ends it where one fails.
PATIENCE = timedelta(days=30)


def of_torchrun() -> tuple[int, int] | None:
    """The number of this process and how many there are; None where torchrun started no others."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" not in os.environ or world < 2:
        return None
    return int(os.environ["RANK"]), world


def scan(
    arguments: argparse.Namespace,
    target: Path,
    rank: tuple[int, int],
    scan_to: Callable[[argparse.Namespace, Path], int],
) -> int:
    """Scan this process's shard into a file beside the table; process 0 merges all of them."""
    number, world = rank
    if arguments.shard is not None:
        hint = "leave it out: torchrun gives each process its shard"
        raise value_error("--shard", "is for processes that know of no others", hint=hint)
    if target.exists() and not arguments.force:
        raise value_error("--out", "exists", got=target, hint="--force writes over it")
    files = [target.with_name(f"{target.name}.shard-{k}-of-{world}") for k in range(1, world + 1)]
    own = argparse.Namespace(**vars(arguments))
    own.shard, own.out = f"{number + 1}/{world}", str(files[number])
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        # torchrun starts all processes again where one was lost: each goes on where it was.
        own.resume, own.force = True, False
    code = scan_to(own, files[number])
    if code:
        return code
    _wait_for_all()
    if number == 0:
        from clearhead.heads.corpus import merge

        merge(files, target)
        for file in files:
            file.unlink()
        print(f"Wrote {Path(arguments.out).expanduser()}", flush=True)
    return 0


def _wait_for_all() -> None:
    """Return when every process has finished its shard: a group needs all of them."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=PATIENCE)
    dist.destroy_process_group()
