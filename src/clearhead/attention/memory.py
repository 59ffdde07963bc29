"""Whether the readings fit: their own checks, and the free memory for those of a whole map."""

from __future__ import annotations

import torch

from clearhead._core import value_error
from clearhead.attention.problem import Problem
from clearhead.readings import Reading

__all__ = ["check_readings", "free_bytes"]

# Sizes below this are allocated without a look at the free memory.
SMALL = 1 << 26


def check_readings(read: tuple[Reading, ...], problem: Problem) -> None:
    """Check each reading against the sizes, and whole maps against the free memory."""
    sizes = problem.sizes
    for reading in read:
        reading.check(sizes)
    maps = [reading for reading in read if reading.whole_map]
    if maps:
        _maps_fit(maps, problem)


def _maps_fit(maps: list[Reading], problem: Problem) -> None:
    itemsize, sizes = problem.dtype.itemsize, problem.sizes
    needed = sum(reading.nbytes(sizes, itemsize) for reading in maps)
    if needed < SMALL or torch.compiler.is_compiling():
        return
    free = free_bytes(problem.query.device)
    if free is not None and needed > free:
        raise value_error(
            "read",
            "weights and scores of all edges must fit in memory",
            got=f"{needed:,} bytes, with {free:,} free",
            shapes={"weights": (*problem.query.shape[:-1], sizes.source)},
            hint="ask for what you need of them: Rows(queries), TopK(k), Received(), Mass(edges), "
            "BlockMap(cells), Entropy() and LogSumExp() take no such memory",
        )


def free_bytes(device: torch.device) -> int | None:
    """How many bytes can still be allocated there; None where it is not known (meta)."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu":
        return None
    known = [_meminfo(), _cgroup()]
    return min((size for size in known if size is not None), default=None)


def _meminfo() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup() -> int | None:
    """What a container's limit leaves; file caches can be reclaimed."""
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if not limit.strip().isdigit() or not used.strip().isdigit():
        return None
    stat = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
    return int(limit) - int(used) + int(stat.get("inactive_file", 0))


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
