"""How a benchmark measures: ways interleaved in one process, medians with spread, the error."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import clearhead as ch
from clearhead import _impl

RESULTS = Path(__file__).parent / "results"


def interleave(
    ways: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Run each way in turn, round after round; give median and spread (IQR over median)."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
    for _ in range(rounds):
        for name, run in ways.items():
            start = clock()
            run()
            spent[name].append(clock() - start)
    return {name: summary(times) for name, times in spent.items()}


def summary(times: list[float]) -> dict[str, float]:
    middle = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (middle, 0, middle)
    return {"median": middle, "spread": (high - low) / middle, "rounds": len(times)}


def repeat(run: Callable[[], Any], times: int) -> Callable[[], None]:
    """A way so short that it is timed `times` over."""

    def many() -> None:
        for _ in range(times):
            run()

    return many


def error(got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> float:
    """Largest error of some rows against the equation in float64."""
    query, source = q.shape[-2], k.shape[-2]
    rows = torch.linspace(0, query - 1, min(query, 13)).long()
    group = q.shape[-3] // k.shape[-3]
    keys, values = (x.double().repeat_interleave(group, -3) for x in (k, v))
    scores = q[..., rows, :].double() @ keys.mT / q.shape[-1] ** 0.5
    if mask is not None:
        sizes = _impl.problem.Sizes(query, source, q.shape[0], q.shape[1])
        scores.masked_fill_(~mask.tile(rows, torch.arange(source), sizes), -torch.inf)
    return (got[..., rows, :].double() - scores.softmax(-1) @ values).abs().max().item()


def machine() -> dict[str, Any]:
    """What the numbers hold for."""
    folder = Path(__file__).parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True
    ).stdout.strip()
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "native": _impl.available()["native"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "clearhead": ch.__version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """The name that Linux gives, with family and model where the name says little."""
    known = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else ():
        name, _, value = line.partition(":")
        known.setdefault(name.strip(), value.strip())
    parts = [f"{key} {known[key]}" for key in ("cpu family", "model") if key in known]
    return f"{known.get('model name', platform.processor())} ({', '.join(parts)})"


def limits(rounds: int = 5) -> dict[str, float]:
    """This machine's own rates, as torch reaches them: a large product, and a sum over memory."""
    a, big = torch.randn(2048, 2048), torch.ones(1 << 26)
    half = a.bfloat16()
    ways = {"fp32": lambda: a @ a, "bf16": lambda: half @ half, "sum": lambda: big.sum()}
    found = interleave(ways, rounds, time.perf_counter)
    flops = 2 * 2048**3 / 1e9
    return {
        "matmul fp32 GFLOP/s": flops / found["fp32"]["median"],
        "matmul bf16 GFLOP/s": flops / found["bf16"]["median"],
        "torch.sum GB/s": big.nbytes / 1e9 / found["sum"]["median"],
    }


def save(name: str, document: dict[str, Any]) -> Path:
    """Write the results as JSON, whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)
    return path
