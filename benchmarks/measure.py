"""A row of the benchmark: the ways to do one piece of work, its lower bound, and its timing.

All ways in a row have to agree before any is timed. They are then timed in turns, round after
round, together with the machine's own limits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import machine

Way = Callable[[], Any]
# The shortest sample, in seconds: shorter calls are repeated.
SAMPLE = 0.02
# How long torch's threads spin after a call, and keep a core busy.
PAUSE = 0.01
# The machine's own limits: multiply-adds alone, and with the operations of a softmax.
LIMITS = ("peak", "bound")
# Between the error of rounding and that of a wrong mask, relative to the largest number.
AGREE = {torch.float32: 2.0**-12, torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}


@dataclass(frozen=True)
class Goal:
    """`of` takes at least `least` times as long as ours; or ours takes `most` (seconds, bytes).

    "peak" is the rate relative to the machine's peak of multiply-adds.
    """

    of: str = ""
    least: float = 0.0
    most: float | None = None


@dataclass
class Row:
    """One piece of work. "ours" is one of its ways; all of them return the same result."""

    name: str
    ways: dict[str, Way]
    dtype: torch.dtype = torch.float32
    flops: float = 0.0
    each: int = 0  # multiply-adds per score
    yardsticks: dict[str, Way] = field(
        default_factory=dict
    )  # timed in turn, without a result to check
    floor: str = ""  # the yardstick that bounds every way from below
    peer: str = "SDPA"  # the way to which the bound refers
    goals: tuple[Goal, ...] = ()
    compare: int = 1  # how many leading tensors of the results have to agree
    error: Callable[[], float] | None = None
    unit: str = "s"
    note: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Settings:
    """Which rows are measured, and how they are timed."""

    quick: bool = False
    rounds: int = 9
    seconds: float = 5.0  # a row ends after so long, with at least three rounds
    cpu_time: bool = False
    dtype: str = "float32"
    shape: tuple[int, ...] | None = None
    mask: str | None = None
    read: str | None = None
    impl: str | None = None

    @property
    def clock(self) -> Callable[[], float]:
        return time.process_time if self.cpu_time else time.perf_counter


def check(row: Row) -> None:
    """Refuse a row in which a result differs from ours."""
    for name, how in differences(row).items():
        raise ValueError(f"{row.name}: {name} {how}")


def differences(row: Row) -> dict[str, str]:
    """Describe every way whose result differs from ours."""
    right = answer(row.ways["ours"], row.compare)
    found = {}
    for name in [name for name in row.ways if name != "ours"]:
        theirs = answer(row.ways[name], row.compare)
        for place, (a, b) in enumerate(zip(right, theirs, strict=True)):
            if a.shape != b.shape:
                found[name] = f"gives {tuple(b.shape)}, not {tuple(a.shape)}"
            elif not (off := _off(a, b)) <= AGREE[row.dtype]:
                found[name] = f"is off by {off:.1e} of the largest number (output {place})"
    return found


def _off(right: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    right, other = right.double(), other.double()
    return (right - other).abs().max().item() / max(right.abs().max().item(), 1e-6)


def answer(way: Way, count: int) -> list[Tensor]:
    """Run a way once, and return the leading tensors of its result."""
    tensors = [x.detach() for x in pytree.tree_leaves(way()) if isinstance(x, Tensor)]
    if len(tensors) < count:
        raise ValueError(f"{count} tensors to compare, and only {len(tensors)} are given")
    return tensors[:count]


def measure(row: Row, settings: Settings) -> None:
    """Time all ways in turns, each repeated to fill a sample, in alternating order."""
    runs = {**row.ways, **row.yardsticks}
    if row.flops and machine.kernel() is not None:
        runs["peak"] = machine.multiply_adds(row.dtype)
        runs["bound"] = machine.multiply_adds(row.dtype, row.each)
    clock, counts = settings.clock, {}
    for name, run in runs.items():
        fastest = _seconds(run, 1, clock)
        if fastest < SAMPLE:
            fastest = min(_seconds(run, 1, clock) for _ in range(3))
        counts[name] = max(1, int(SAMPLE / max(fastest, 1e-7)))
    row.samples = {name: [] for name in runs}
    end = time.monotonic() + settings.seconds
    for turn in range(settings.rounds):
        for name in list(runs) if turn % 2 == 0 else reversed(list(runs)):
            time.sleep(PAUSE)
            row.samples[name].append(_seconds(runs[name], counts[name], clock))
        if time.monotonic() > end and turn >= 2:
            break


def _seconds(run: Way, count: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(count):
        run()
    return (clock() - start) / count


def summary(row: Row) -> dict[str, Any]:
    """The results of a row, as JSON values."""
    middle = {name: statistics.median(x) for name, x in row.samples.items()}
    ours = middle["ours"]
    peak, most = (machine.PEAK_FLOPS / middle[x] if x in middle else 0 for x in LIMITS)
    least = middle.get(row.floor, 0.0) + (row.flops / most if most else 0.0)
    found = {
        "work": row.name,
        "dtype": str(row.dtype).removeprefix("torch."),
        "unit": row.unit,
        "ours": ours,
        "spread": spread(row.samples["ours"]),
        "others": {n: x for n, x in middle.items() if n not in ("ours", *LIMITS)},
        "yardsticks": list(row.yardsticks),
        "of_peak": row.flops / ours / peak if peak and not row.floor else None,
        "bound": middle[row.peer] / least if least and row.peer in middle else None,
        "error": row.error() if row.error else None,
        "note": row.note,
        "samples": {n: [float(f"{x:.4g}") for x in s] for n, s in row.samples.items()},
    }
    found["goals"] = [_reached(goal, found, row.peer) for goal in row.goals]
    return found


def spread(samples: list[float]) -> float | None:
    """Half the interquartile range, relative to the median."""
    if len(samples) < 3:
        return None
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / middle


def _reached(goal: Goal, found: dict[str, Any], peer: str) -> dict[str, Any]:
    """A goal, and whether it is met, or why it cannot be."""
    if goal.most is not None:
        return {"most": goal.most, "state": "met" if found["ours"] <= goal.most else "missed"}
    if goal.of == "peak":
        got = found["of_peak"]
    else:
        got = found["others"][goal.of] / found["ours"] if goal.of in found["others"] else None
    if got is None:
        state = "not measured"
    elif got >= goal.least:
        state = "met"
    else:
        beyond = goal.of == peer and found["bound"] is not None and found["bound"] < goal.least
        state = "above the bound" if beyond else "missed"
    return {"of": goal.of, "least": goal.least, "state": state}
