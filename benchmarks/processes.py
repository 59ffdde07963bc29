"""Rows that need processes of their own: memory and start-up time.

`python benchmarks/processes.py WAY LENGTH THREADS` is the child that measures memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import resident
from measure import Goal, Row

HEAD, WIDTH = 12, 64
# The ways, and the longest sequence of each: eager keeps several maps of T x T numbers.
WAYS = {
    "ours": 1 << 20,
    "ours, no readings": 1 << 20,
    "tiled": 1 << 20,
    "SDPA": 1 << 20,
    "eager": 4096,
}


def memory(lengths: Sequence[int]) -> Iterator[Row]:
    """The memory of a causal call beyond its inputs, with all readings but whole maps."""
    import torch

    threads = torch.get_num_threads()
    for length in lengths:
        found = {n: [_peak(n, length, threads)] for n, most in WAYS.items() if length <= most}
        goals = [Goal(most=60e6)] if length == 8192 else []
        if "eager" in found:
            goals.append(Goal("eager", 1))
        yield Row(f"memory, all readings (1, {HEAD}, {length}, {WIDTH})", {}, unit="B",
                  goals=tuple(goals), peer="eager", samples=found)  # fmt: skip


def _peak(way: str, length: int, threads: int) -> float:
    command = [sys.executable, __file__, way, str(length), str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def child(way: str, length: int, threads: int) -> int:
    """The largest growth of the resident set during one call, in bytes."""
    import torch

    torch.set_num_threads(threads)
    call = _calls()[way]
    call(torch.randn(1, HEAD, 64, WIDTH))
    x = torch.randn(1, HEAD, length, WIDTH)
    resident.forget_peak()
    before = resident.peak()
    call(x)
    return resident.peak() - before


def _calls() -> dict[str, Callable[[Any], Any]]:
    import clearhead as ch
    import peers
    from cases import FIVE
    from clearhead import masks, readings

    causal = masks.causal()
    everything = (*FIVE, readings.Distance(), readings.Mass(masks.first(4)))
    return {
        "ours": lambda x: ch.attend(x, x, x, causal, read=everything),
        "ours, no readings": lambda x: ch.attend(x, x, x, causal),
        "tiled": lambda x: ch.attend(x, x, x, causal, read=everything, impl="tiled"),
        "SDPA": lambda x: peers.sdpa(x, x, x, causal)(),
        "eager": lambda x: peers.eager(x, x, x, causal)(),
    }


def processor_time() -> float:
    """The processor time of the child processes that ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def start(rounds: int, clock: Callable[[], float] = time.perf_counter) -> Iterator[Row]:
    """The time of the import, and of the first picture."""
    commands = {
        "import torch": ["-c", "import torch"],
        "ours": ["-c", "import torch, clearhead"],
        "look": ["-m", "clearhead", "look", "hell"],
    }
    spent: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            begin = clock()
            subprocess.run([sys.executable, *command], check=True, capture_output=True)
            spent[name].append(clock() - begin)
    torch, ours, look = (spent[name] for name in commands)
    added = median(ours) - median(torch)
    yield Row(
        "import torch, clearhead", {}, peer="import torch",
        goals=(Goal(most=median(torch) + 0.15),), note=f"adds {added * 1e3:.0f} ms",
        samples={"ours": ours, "import torch": torch},
    )  # fmt: skip
    yield Row(
        "clearhead look hell", {}, peer="import torch", goals=(Goal(most=5.0),),
        samples={"ours": look, "import torch": torch},
    )  # fmt: skip


if __name__ == "__main__":
    print(child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
