"""Whether the readings fit: their own checks, and the free memory for their values."""

from __future__ import annotations

import torch

from clearhead._core import Sizes, value_error
from clearhead.attention.problem import Problem
from clearhead.readings import Reading

__all__ = ["check_fit", "check_readings", "free_bytes"]

Shape = tuple[int, ...]

# Sizes below this are allocated without a look at the free memory.
SMALL = 1 << 26
# The argument that sets the size of a reading, and what takes less memory.
ARGUMENTS = {
    "TopK": ("k", "there are no more weights than sources: a smaller k shows the largest"),
    "BlockMap": ("cells", "take fewer cells a side"),
    "Rows": ("queries", "read fewer queries at a time"),
}
WHOLE = (
    "ask for what you need of the map: Rows(queries), TopK(k), Received(), Mass(edges), "
    "BlockMap(cells), Entropy() and LogSumExp() take no memory for each edge"
)


def check_readings(read: tuple[Reading, ...], problem: Problem) -> None:
    """Check each reading against the sizes, and their values against the free memory."""
    sizes = problem.sizes
    for reading in read:
        reading.check(sizes)
    if torch.compiler.is_compiling():
        return
    itemsize = problem.dtype.itemsize
    if sum(reading.nbytes(sizes, itemsize) for reading in read) < SMALL:
        return
    free = free_bytes(problem.query.device)
    if free is not None:
        shape = (*problem.query.shape[:-1], sizes.source)
        check_fit(read, sizes, itemsize, free, f"{free:,} free", shape)


def check_fit(
    read: tuple[Reading, ...], sizes: Sizes, itemsize: int, free: int, have: str, shape: Shape
) -> None:
    """Refuse readings whose values take more than the free bytes; `have` says what there is."""
    needed = [reading.nbytes(sizes, itemsize) for reading in read]
    if sum(needed) <= free:
        return
    pairs = [*zip(read, needed, strict=True)]
    largest, size = max(pairs, key=lambda pair: pair[1])
    if largest.whole_map:
        size = sum(own for reading, own in pairs if reading.whole_map)
    raise _too_large(largest, f"{size:,} bytes, with {have}", shape)


def _too_large(reading: Reading, got: str, shape: Shape) -> ValueError:
    """Name the argument that makes a value too large, or the reading, and what takes less."""
    name, hint = ARGUMENTS.get(type(reading).__name__, ("read", WHOLE))
    shown = type(reading).__name__ if name == "queries" else repr(reading)
    return value_error(
        name,
        f"is small enough for the value of {shown} to fit in memory",
        got=got,
        shapes={"weights": shape},
        hint=hint,
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
