"""Which process is lost: gloo tells that a connection broke or timed out, but not whose."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["naming_lost"]

# How long broken connections take to become known, and ranks that still run to report themselves.
SETTLE, GRACE = 0.2, 3.0
# No other message of a training has it.
TAG = 0xC1EA


@contextmanager
def naming_lost(group: Any, step: str) -> Iterator[None]:
    """Inside the block an error of gloo becomes one that names the rank that is lost."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error):
            raise
        raise _error(group, step) from error


def _error(group: Any, step: str) -> RuntimeError:
    lost = ", ".join(f"rank {dist.get_global_rank(group, rank)}" for rank in _lost(group))
    return RuntimeError(
        f"{lost or 'another rank'} did not answer in {step}: it has ended, stalled or failed\n"
        "  to do: see the log of that rank, and start all of them again with --resume; what was "
        "saved before is untouched"
    )


def _lost(group: Any) -> list[int]:
    """The ranks whose connection is closed and that have not reported; else all that do not report.

    A rank that ends because another one is lost reports first.
    """
    me, world = dist.get_rank(group), dist.get_world_size(group)
    peers = [rank for rank in range(world) if rank != me]
    silent = _Reports(group, me).missing
    time.sleep(SETTLE)
    closed = [peer for peer in peers if _is_closed(group, peer)]
    gone = silent(closed)
    _close(group, [peer for peer in peers if peer not in closed])
    end = time.monotonic() + GRACE
    while not gone and silent(peers) and time.monotonic() < end:
        time.sleep(0.05)
    # Where this process ends, gloo's threads have to be done with what they hold: its destructor
    # waits for them without releasing the GIL, which they need.
    time.sleep(SETTLE)
    return gone or silent(peers)


class _Reports:
    """The ranks that tell, in the store of the group, that they have lost another one."""

    def __init__(self, group: Any, me: int) -> None:
        self.store = dist.distributed_c10d._get_process_group_store(group)
        with suppress(RuntimeError):
            self.store.set(f"clearhead/ends/{me}", "")

    def missing(self, ranks: list[int]) -> list[int]:
        """Those that have not reported; all where the store is lost with the rank that holds it."""
        with suppress(RuntimeError):
            return [rank for rank in ranks if not self.store.check([f"clearhead/ends/{rank}"])]
        return ranks


def _is_closed(group: Any, peer: int) -> bool:
    """Whether the connection is closed: then nothing can be asked for over it."""
    try:
        dist.irecv(torch.zeros(1), group=group, group_src=peer, tag=TAG)
    except RuntimeError:
        return True
    return False


def _close(group: Any, peers: list[int]) -> None:
    """Close all connections, so that no rank waits for this one: gloo does so on a timeout."""
    with suppress(RuntimeError):
        for peer in peers[:1]:
            asked: Any = dist.irecv(torch.zeros(1), group=group, group_src=peer, tag=TAG + 1)
            asked.wait(timedelta(milliseconds=1))
