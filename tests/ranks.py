"""Processes of one gloo group that run functions of the tests: one group serves a whole module."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Groups of the first N ranks, and groups in which a rank is lost: with a short timeout.
SIZES = (1, 2, 3, 4, 8)
SHORT = 3.0
LOST = {
    "stalls": [0, 1, 2, 3], "late": [0, 1, 2, 3], "backward": [0, 1, 2, 3],
    "raises": [0, 1, 2, 3], "killed": [4, 5, 6, 7],
}  # fmt: skip
PATIENT = timedelta(seconds=60)


class Ranks:
    """The processes. `run` calls a function in some of them, with the name of a group."""

    def __init__(self, path: Path, world: int = 8):
        context = mp.get_context("spawn")
        self.calls = [context.Queue() for _ in range(world)]
        self.answers = context.Queue()
        self.processes = [
            context.Process(target=_serve, args=(rank, world, str(path), call, self.answers))
            for rank, call in enumerate(self.calls)
        ]
        for process in self.processes:
            process.start()

    def run(
        self, function: Callable[..., Any], group: int | str, *given: Any, silent: int = 0
    ) -> list[Any]:
        """The results of the members of a group, in order; errors are returned, not raised.

        `silent` is how many ranks, the last ones, do not answer because they die.
        """
        members = LOST[group] if isinstance(group, str) else list(range(group))
        for rank in members:
            self.calls[rank].put((function, group, given))
        answering = members[: len(members) - silent]
        found = dict(self.answers.get(timeout=100) for _ in answering)
        return [found[rank] for rank in answering]

    def close(self) -> None:
        """End all processes."""
        for call in self.calls:
            call.put(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def _serve(rank: int, world: int, path: str, calls: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world, timeout=PATIENT
    )
    groups: dict[int | str, Any] = {
        size: dist.new_group(list(range(size)), timeout=PATIENT) for size in SIZES if size <= world
    }
    short = timedelta(seconds=SHORT)
    lost = {name: members for name, members in LOST.items() if max(members) < world}
    groups |= {name: dist.new_group(members, timeout=short) for name, members in lost.items()}
    while (call := calls.get()) is not None:
        function, group, given = call
        try:
            answer = function(groups[group], *given)
        except Exception as error:
            answer = Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
        answers.put((rank, answer))
    os._exit(0)


class Failure:
    """An error of a rank."""

    def __init__(self, text: str, trace: str):
        self.text, self.trace = text, trace

    def __repr__(self) -> str:
        return self.trace
