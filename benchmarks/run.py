"""Measure clearhead beside torch on this machine: time, error and memory, losses as well as wins.

    python benchmarks/run.py                    all rows (some minutes)
    python benchmarks/run.py --quick            smaller sizes, fewer rounds
    python benchmarks/run.py --only attend      one group of rows: attend, memory, start
    python benchmarks/run.py --shape 1,12,4096,64 --dtype bfloat16 --mask "causal & window(256)" \\
        --read "Entropy(), TopK(8)"             your own case

A and B take turns in one process; a row gives medians with the spread between the quartiles, the
ratio of the medians, and the error against float64 beside that of A. `--cpu-time` counts processor
time on one thread instead of the clock, for a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from clearhead import masks, readings

HERE = Path(__file__).parent
FIVE = (
    readings.LogSumExp(), readings.TopK(8), readings.Entropy(), readings.Received(),
    readings.BlockMap(32),
)  # fmt: skip


@dataclass
class Row:
    """One comparison. Times are in seconds, sizes in bytes, whatever `unit` says."""

    name: str
    peer: str
    theirs: list[float]
    ours: list[float]
    unit: str = "ms"
    limit: float | None = None  # the ratio that the project promises
    error: float | None = None
    peer_error: float | None = None
    note: str = ""
    ratio: float = field(init=False)

    def __post_init__(self) -> None:
        self.ratio = statistics.median(self.ours) / max(statistics.median(self.theirs), 1e-12)


# Peers: each takes q, k, v and whether the mask is causal, and gives the context.

Peer = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """F.scaled_dot_product_attention, torch's fused kernel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The three lines that give weights: what most libraries fall back to."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~ones.tril(), -torch.inf)
    return scores.softmax(-1) @ v


PEERS: dict[str, Peer] = {"sdpa": sdpa}


def rounds(
    calls: dict[str, Callable[[], Any]], count: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Time the calls in turn, so that what disturbs one disturbs the others."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return times


def attend_rows(args: argparse.Namespace) -> list[Row]:
    """Time each implementation beside each peer, without readings and with five."""
    rows = []
    sizes = [(1, 12, 1024 if args.quick else 4096, 64)]
    impls = [name for name, state in ch._impl.available().items() if state == "ready"]
    for shape in sizes:
        for causal in (False, True):
            for impl in impls:
                if impl != "reference":
                    rows += _attend(args, shape, causal, impl)
    return rows


def _attend(args: argparse.Namespace, shape: Any, causal: bool, impl: str) -> list[Row]:
    q, k, v = (torch.randn(shape) for _ in range(3))
    mask = masks.causal() if causal else None
    calls: dict[str, Callable[[], Any]] = {
        name: lambda peer=peer: peer(q, k, v, causal) for name, peer in PEERS.items()
    }
    calls["none"] = lambda: ch.attend(q, k, v, mask, impl=impl)
    calls["five"] = lambda: ch.attend(q, k, v, mask, read=FIVE, impl=impl)
    times = rounds(calls, args.rounds, args.clock)
    right = sample(q, k, v, causal)
    # What is promised is promised at this size.
    limits = {"none": 1.15, "five": 2.1} if impl == "tiled" and shape[-2] == 4096 else {}
    rows = []
    for peer, call in PEERS.items():
        for what, label in (("none", ""), ("five", ", five readings")):
            ours = calls[what]()
            context = ours if what == "none" else ours[0]
            rows.append(Row(
                f"{impl} {'causal' if causal else 'full'}{label} {tuple(shape)}", peer,
                times[peer], times[what], limit=limits.get(what), error=off(context, right),
                peer_error=off(call(q, k, v, causal), right),
            ))  # fmt: skip
    return rows


def sample(q: Tensor, k: Tensor, v: Tensor, causal: bool, count: int = 64) -> dict[int, Tensor]:
    """Right contexts of some rows, in float64."""
    size = q.shape[-2]
    places = torch.linspace(0, size - 1, min(count, size)).long().tolist()
    right = {}
    for i in places:
        stop = i + 1 if causal else size
        scores = q[..., i : i + 1, :].double() @ k[..., :stop, :].double().mT * q.shape[-1] ** -0.5
        right[i] = (scores.softmax(-1) @ v[..., :stop, :].double())[..., 0, :]
    return right


def off(context: Tensor, right: dict[int, Tensor]) -> float:
    """How far the context is from the right rows, at most."""
    return max((context[..., i, :].double() - row).abs().max().item() for i, row in right.items())


def memory_rows(args: argparse.Namespace) -> list[Row]:
    """Measure the memory of a call beside eager's, each in a process of its own, as T doubles."""
    lengths = [512, 1024, 2048] if args.quick else [2048, 4096, 8192]
    rows = []
    for what, label in (("none", ""), ("five", ", five readings")):
        for length in lengths:
            theirs, ours = (_peak(way, length) for way in ("eager", what))
            name = f"memory at T={length}{label} (1, 4, {length}, 64)"
            rows.append(Row(name, "eager", [theirs], [ours], unit="MB", note="over the inputs"))
    return rows


def _peak(way: str, length: int) -> float:
    command = [sys.executable, __file__, "--child", way, str(length)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def child(way: str, length: int) -> int:
    """Bytes by which the resident set grows at most during one call."""
    torch.set_num_threads(1)
    calls = {
        "eager": lambda x: eager(x, x, x, True),
        "none": lambda x: ch.attend(x, x, x, masks.causal(), impl="tiled"),
        "five": lambda x: ch.attend(x, x, x, masks.causal(), read=FIVE, impl="tiled"),
    }
    calls[way](torch.randn(1, 4, 64, 64))
    x = torch.randn(1, 4, length, 64)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _resident("VmHWM")
    calls[way](x)
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


def start_rows(args: argparse.Namespace) -> list[Row]:
    """Time what a newcomer waits for: the import, and the first picture."""
    count = 3 if args.quick else 9
    imports = rounds(
        {
            "torch": lambda: _python("import torch"),
            "both": lambda: _python("import torch, clearhead"),
        },
        count,
        time.perf_counter,
    )
    added = statistics.median(imports["both"]) - statistics.median(imports["torch"])
    rows = [Row("import clearhead", "import torch", imports["torch"], imports["both"],
                note=f"adds {added * 1e3:.0f} ms (promised: at most 150 ms)")]  # fmt: skip
    look = [sys.executable, "-m", "clearhead", "look", "hell"]
    done = subprocess.run(look, capture_output=True)
    if done.returncode:
        print(f"left out: clearhead look hell (exit code {done.returncode})", file=sys.stderr)
        return rows
    looks = rounds({"look": lambda: subprocess.run(look, check=True, capture_output=True)},
                   count // 3, time.perf_counter)  # fmt: skip
    rows.append(Row("clearhead look hell", "import torch", imports["torch"], looks["look"],
                    note="promised: at most 5 s"))  # fmt: skip
    return rows


def _python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def own_row(args: argparse.Namespace) -> list[Row]:
    """Time a case from the command line beside SDPA with the same mask."""
    shape = tuple(map(int, args.shape.split(",")))
    dtype = getattr(torch, args.dtype)
    q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
    mask = masks.parse(args.mask) if args.mask else None
    known = {name: getattr(readings, name) for name in readings.__all__} | {"masks": masks}
    read = eval(f"({args.read},)", {"__builtins__": {}}, known) if args.read else None
    allowed = None if mask is None else mask.to_sdpa(shape[-2])
    calls: dict[str, Callable[[], Any]] = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=allowed),
        "ours": lambda: ch.attend(q, k, v, mask, read=read, impl=args.impl),
    }
    times = rounds(calls, args.rounds, args.clock)
    name = f"{args.impl or 'attend'} {shape} {args.dtype} {args.mask or 'no mask'}"
    return [Row(name, "sdpa", times["sdpa"], times["ours"], note=args.read or "no readings")]


GROUPS = {"attend": attend_rows, "memory": memory_rows, "start": start_rows}


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on."""
    name = platform.processor() or platform.machine()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        lines = cpu.read_text().splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {
        "machine": f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "clock": "processor time" if args.cpu_time else "wall clock",
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "clearhead": ch.__version__,
        "commit": commit or "unknown",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def show(about: dict[str, Any], rows: list[Row]) -> None:
    print("  ".join(f"{name} {value}" for name, value in about.items()))
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}  {'peer':>12} {'theirs':>13} {'ours':>13} {'ratio':>6}  error (theirs)")
    for row in rows:
        limit = "" if row.limit is None else f" <= {row.limit}"
        missed = " MISSED" if row.limit is not None and row.ratio > row.limit else ""
        error = "" if row.error is None else f"{row.error:.1e} ({row.peer_error:.1e})"
        print(
            f"{row.name:{width}}  {row.peer:>12} {spread(row.theirs, row.unit):>13} "
            f"{spread(row.ours, row.unit):>13} {row.ratio:5.2f}x{limit}{missed}  {error} {row.note}"
        )


def spread(values: list[float], unit: str) -> str:
    """Median and half the distance between the quartiles."""
    factor = {"ms": 1e3, "MB": 1e-6}[unit]
    middle = statistics.median(values) * factor
    if len(values) < 4:
        return f"{middle:.0f} {unit}"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{middle:.0f} ±{(high - low) / 2 * factor:.0f} {unit}"


def save(about: dict[str, Any], rows: list[Row], path: Path) -> None:
    """Write the results whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(
        json.dumps({"about": about, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
    )
    os.replace(part, path)
    print(f"Wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument("--only", choices=GROUPS, nargs="+", help="some groups of rows")
    parser.add_argument("--threads", type=int, help="torch's threads (1 with --cpu-time)")
    parser.add_argument("--cpu-time", action="store_true", help="processor time on one thread")
    parser.add_argument("--rounds", type=int, help="how often A and B take turns (9; quick: 3)")
    parser.add_argument("--shape", help="batch,head,position,head_dim of your own case")
    parser.add_argument("--dtype", default="float32", help="its dtype")
    parser.add_argument("--mask", help='its mask, such as "causal & window(256)"')
    parser.add_argument("--read", help='its readings, such as "Entropy(), TopK(8)"')
    parser.add_argument("--impl", help="its implementation (the first that can serve)")
    parser.add_argument("--out", type=Path, help="where to write (benchmarks/results/run.json)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(child(args.child[0], int(args.child[1])))
        return
    if args.cpu_time or args.threads:
        torch.set_num_threads(args.threads or 1)
    args.clock = time.process_time if args.cpu_time else time.perf_counter
    args.rounds = args.rounds or (3 if args.quick else 9)
    groups = [own_row] if args.shape else [GROUPS[name] for name in args.only or GROUPS]
    with torch.no_grad():
        rows = [row for group in groups for row in group(args)]
    about = machine(args)
    show(about, rows)
    if not args.shape or args.out:
        save(about, rows, args.out or HERE / "results" / "run.json")


if __name__ == "__main__":
    main()
