"""The machine of a benchmark: its limits, the versions and the commit."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Operations of one call of `multiply_adds`, over all threads; about four milliseconds.
PEAK_FLOPS = 1e9


def cpu() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The measured commit, and whether the tree is dirty."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        found = ""
    return found or "unknown"


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def facts(cpu_time: bool = False) -> dict[str, Any]:
    """What the results depend on, besides the limits."""
    import torch

    import clearhead

    found = kernel()
    return {
        "machine": f"{cpu()}, {os.cpu_count()} cores, {platform.system()}",
        "threads": torch.get_num_threads(),
        "clock": "processor time" if cpu_time else "wall time",
        "load at the start": round(os.getloadavg()[0], 1),
        "kernel": "not compiled" if found is None else found.isa(),
        "SDPA": f"torch's, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "onnxruntime": version("onnxruntime"),
        "python": platform.python_version(),
        "clearhead": clearhead.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def line(cpu_time: bool = False) -> str:
    """The same on one line, for benchmarks with tables of their own."""
    return ", ".join(f"{name} {value}" for name, value in facts(cpu_time).items())


def kernel() -> Any:
    """The compiled kernel, which can also run multiply-adds alone; None without one."""
    from clearhead.attention.impl.native import kernel

    return kernel._native


def multiply_adds(dtype: Any, each: int = 0) -> Callable[[], Any]:
    """A call that does PEAK_FLOPS operations in a dtype, and nothing else.

    With `each`, a score's maximum, exponential and sum come after so many multiply-adds of it.
    """
    native, pairs = kernel(), str(dtype) == "torch.bfloat16"
    trial = 1000
    rounds = int(trial * PEAK_FLOPS / native.peak(trial, each, pairs))
    return lambda: native.peak(rounds, each, pairs)


def limits(clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Operations per second of multiply-adds alone, and bytes per second of a large sum."""
    import torch

    found = {}
    if kernel() is not None:
        for name in ("float32", "bfloat16"):
            call = multiply_adds(getattr(torch, name))
            found[f"GFLOP/s {name}"] = round(PEAK_FLOPS / _median(call, clock) / 1e9, 1)
    numbers = torch.ones(1 << 26)
    found["GB/s read"] = round(4 * numbers.numel() / _median(numbers.sum, clock) / 1e9, 1)
    return found


def _median(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    call()
    times = []
    for _ in range(7):
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times)
