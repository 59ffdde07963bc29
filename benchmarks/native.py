"""The compiled kernel beside its peers and the machine's own limits, interleaved in one process.

    python benchmarks/native.py                  every row; about ten minutes
    python benchmarks/native.py --quick          smaller sizes, under two minutes
    python benchmarks/native.py --shape 1,12,4096,64 --dtype bfloat16 --mask 'causal & window(256)'
    python benchmarks/native.py --clock cpu      one thread, its CPU time: for a machine in use
    python benchmarks/native.py --write          keeps results/native.json, docs/performance.md

Each row runs its contenders in turn, round after round; figures are medians over the rounds, the
spread is half the distance between the quartiles, and `error` is against float64 on some heads.
Rows that ours loses are in the same table.
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from clearhead import masks, readings
from clearhead._impl import _kernel

ROOT = Path(__file__).resolve().parent.parent
ALL = (
    readings.LogSumExp(), readings.TopK(8), readings.Entropy(), readings.Received(),
    readings.BlockMap(32),
)  # fmt: skip


@dataclass
class Row:
    """One piece of work: what it costs in floating-point operations, and who does it how."""

    name: str
    ways: dict[str, Callable[[], Any]]
    flops: float = 0.0
    dtype: torch.dtype = torch.float32
    bytes: float = 0.0
    target: str = ""
    error: Callable[[], float] | None = None
    times: dict[str, list[float]] = field(default_factory=dict)


def tensors(shape: tuple[int, ...], dtype: torch.dtype, source: int | None = None) -> list[Tensor]:
    """Query, key and value; fewer queries than sources where `source` is given."""
    batch, head, query, width = shape
    sizes = (query, source or query, source or query)
    return [torch.randn(batch, head, size, width).to(dtype) for size in sizes]


def eager(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention that shows its weights, as most models write it."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    weights = scores.softmax(-1)
    return weights @ v, weights


def error(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """The largest error of ours against float64, over SDPA's in the same dtype, on one head."""
    q, k, v = (x[:1, :1] for x in (q, k, v))
    right = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    ours = ch.attend(q, k, v, masks.causal() if causal else None)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return float((ours - right).abs().max() / (theirs - right).abs().max())


def plain_rows(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[Row]:
    """Context alone, full and causal, and with all readings."""
    rows = []
    for dtype in dtypes:
        goals = ("2.3x", "2.6x") if dtype == torch.float32 else ("4x", "4.5x")
        for shape in shapes:
            q, k, v = tensors(shape, dtype)
            batch, head, size, width = shape
            flops = 4.0 * batch * head * size * size * width
            sdpa = partial(F.scaled_dot_product_attention, q, k, v)
            rows.append(
                Row(
                    f"full {shape}",
                    {"ours": partial(ch.attend, q, k, v), "SDPA": sdpa},
                    flops,
                    dtype,
                    target=goals[0],
                    error=partial(error, q, k, v, False),
                )
            )
            rows.append(
                Row(
                    f"causal {shape}",
                    {
                        "ours": partial(ch.attend, q, k, v, masks.causal()),
                        "SDPA": partial(sdpa, is_causal=True),
                    },
                    flops / 2,
                    dtype,
                    target=goals[1],
                    error=partial(error, q, k, v, True),
                )
            )
            if size >= 4096:
                rows.append(
                    Row(
                        f"all readings {shape}",
                        {
                            "ours": partial(ch.attend, q, k, v, read=ALL),
                            "SDPA": sdpa,
                            "ours, none": partial(ch.attend, q, k, v),
                        },
                        flops,
                        dtype,
                        target="2x; 1.2 (bf16 1.35) of none",
                    )
                )
    return rows  # fmt: skip


def mask_rows(size: int, head: int) -> list[Row]:
    """Masks that leave most tiles empty, against a bool tensor and compiled FlexAttention."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = tensors((1, head, size, 64), torch.float32)
    ids = torch.arange(size) // 600
    rows = []
    for name, mask in (
        ("window(256)", masks.window(256)),
        ("documents of 600, causal", masks.document(ids) & masks.causal()),
        ("window(256) and 4 sinks", masks.causal() & (masks.window(256) | masks.first(4))),
    ):
        allowed = mask.dense(size)
        ways = {
            "ours": partial(ch.attend, q, k, v, mask),
            "SDPA": partial(F.scaled_dot_product_attention, q, k, v, attn_mask=allowed),
            "ours, bool tensor": partial(ch.attend, q, k, v, allowed),
        }
        try:
            flex = torch.compile(flex_attention)
            block_mask = mask.to_flex(size)
            flex(q, k, v, block_mask=block_mask)
            ways["flex"] = partial(flex, q, k, v, block_mask=block_mask)
        except Exception as reason:  # no compiler, or none for this mask
            print(f"flex_attention left out of {name}: {str(reason).splitlines()[0][:90]}")
        rows.append(Row(f"{name} at {size}", ways, target="25x, 2x flex"))
    return rows


def backward_rows(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[Row]:
    """`autograd.grad` alone, after an untimed forward."""
    rows = []
    for dtype in dtypes:
        for shape in shapes:
            batch, head, size, width = shape
            leaves = [x.requires_grad_() for x in tensors(shape, dtype)]
            grad = torch.randn(shape).to(dtype)
            for name, mask, causal in (("full", None, False), ("causal", masks.causal(), True)):
                outs = {
                    "ours": ch.attend(*leaves, mask),
                    "SDPA": F.scaled_dot_product_attention(*leaves, is_causal=causal),
                }
                ways = {
                    who: partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)
                    for who, out in outs.items()
                }
                flops = 10.0 * batch * head * size * size * width / (2 if causal else 1)
                goal = "2.3x" if dtype == torch.float32 else "2x"
                rows.append(Row(f"backward, {name} {shape}", ways, flops, dtype, target=goal))
    return rows


def decode_rows(sizes: list[int], dtypes: list[torch.dtype]) -> list[Row]:
    """One query over a long cache: reading it is all the work."""
    rows = []
    for dtype in dtypes:
        for size in sizes:
            q, k, v = tensors((1, 12, 1, 64), dtype, source=size)
            ways = {
                "ours": partial(ch.attend, q, k, v),
                "SDPA": partial(F.scaled_dot_product_attention, q, k, v),
                "sum of K and V": lambda k=k, v=v: (k.sum(), v.sum()),
            }
            read = 2.0 * k.numel() * k.element_size()
            rows.append(
                Row(
                    f"decode, cache {size}",
                    ways,
                    dtype=dtype,
                    bytes=read,
                    target="1.5x; 85% of sum",
                )
            )
    return rows


def small_rows() -> list[Row]:
    """Where the call itself costs."""
    rows = []
    for shape, target in (
        ((32, 8, 64, 32), "2x"),
        ((1, 4, 64, 64), "1.3x"),
        ((1, 1, 4, 3), "12 us"),
    ):
        q, k, v = tensors(shape, torch.float32)
        ways = {
            "ours": partial(ch.attend, q, k, v),
            "SDPA": partial(F.scaled_dot_product_attention, q, k, v),
        }
        flops = 4.0 * math.prod(shape) * shape[2]
        rows.append(Row(f"small {shape}", ways, flops, target=target))
    return rows


def layer_rows() -> list[Row]:
    """Weights from whoever shows them, and the layer as a whole."""
    q, k, v = tensors((1, 12, 1024, 64), torch.float32)
    layer = torch.nn.MultiheadAttention(768, 12, batch_first=True)
    ours = ch.MultiheadAttention(768, 12, batch_first=True)
    ours.load_state_dict(layer.state_dict())
    x = torch.randn(1, 1024, 768)
    return [
        Row("top 8, entropy and received (1, 12, 1024, 64)", {
            "ours": partial(ch.attend, q, k, v, read=ALL[1:4]), "eager weights": partial(eager, q, k, v)}),
        Row("MultiheadAttention, 1024 positions, without weights", {
            "ours": lambda: ours(x, x, x, need_weights=False),
            "torch": lambda: layer(x, x, x, need_weights=False)}),
        Row("MultiheadAttention, 1024 positions, with weights", {
            "ours": lambda: ours(x, x, x), "torch": lambda: layer(x, x, x)}),
    ]  # fmt: skip


def limits() -> dict[str, float]:
    """Operations a second of the multiply-adds alone, and bytes a second of a large sum."""
    kernel, found = _kernel._native, {}
    for name, pairs in (("float32", False), ("bfloat16", True)):
        kernel.peak(10**5, pairs)
        start = CLOCK()
        found[name] = kernel.peak(2 * 10**6, pairs) / (CLOCK() - start)
    x = torch.ones(1 << 26)
    x.sum()
    start = CLOCK()
    x.sum()
    found["bytes"] = x.numel() * 4 / (CLOCK() - start)
    return found


CLOCK = time.perf_counter


def measure(row: Row, rounds: int, seconds: float) -> None:
    """Run the contenders in turn, each often enough to be timed."""
    counts = {}
    for name, way in row.ways.items():
        way()
        start = CLOCK()
        way()
        counts[name] = max(1, int(0.02 / max(CLOCK() - start, 1e-7)))
        row.times[name] = []
    end = time.monotonic() + seconds
    for _ in range(rounds):
        for name, way in row.ways.items():
            start = CLOCK()
            for _ in range(counts[name]):
                way()
            row.times[name].append((CLOCK() - start) / counts[name])
        if time.monotonic() > end and len(row.times["ours"]) >= 3:
            break


def summary(row: Row, peaks: dict[str, float]) -> dict[str, Any]:
    """The figures of a row."""
    ours = statistics.median(row.times["ours"])
    middle = statistics.quantiles(row.times["ours"], n=4)
    dtype = str(row.dtype).replace("torch.", "")
    return {
        "work": row.name,
        "dtype": dtype,
        "ms": ours * 1e3,
        "spread": (middle[2] - middle[0]) / 2 / ours,
        "ratios": {n: statistics.median(t) / ours for n, t in row.times.items() if n != "ours"},
        "of_peak": row.flops / ours / peaks[dtype] if row.flops and dtype in peaks else None,
        "error": row.error() if row.error else None,
        "target": row.target,
    }


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    ratios = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in found["ratios"].items())
    peak = f"{found['of_peak']:.0%}" if found["of_peak"] else ""
    error = f"{found['error']:.2f}" if found["error"] is not None else ""
    return (f"| {found['work']} | {found['dtype']} | {found['ms']:.3g} ± {found['spread']:.0%} | {ratios} "
            f"| {peak} | {error} | {found['target']} |")  # fmt: skip


HEAD = (
    "| work | dtype | ours, ms | the others take, times ours | of FMA peak | error, of SDPA's | goal |\n"
    "|---|---|---|---|---|---|---|"
)


def machine(peaks: dict[str, float]) -> dict[str, Any]:
    """What the figures belong to."""
    cpu = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x] \
        if Path("/proc/cpuinfo").exists() else [platform.processor()]  # fmt: skip
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "cpu": cpu[0],
        "threads": torch.get_num_threads(),
        "clock": "CPU time" if CLOCK is time.process_time else "wall time",
        "kernel": _kernel._native.isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "GFLOP/s float32": round(peaks["float32"] / 1e9),
        "GFLOP/s bfloat16": round(peaks["bfloat16"] / 1e9),
        "GB/s": round(peaks["bytes"] / 1e9, 1),
    }


def own_row(args: argparse.Namespace) -> list[Row]:
    """One's own case."""
    shape = tuple(map(int, args.shape.split(",")))
    q, k, v = tensors(shape, getattr(torch, args.dtype))
    mask = masks.parse(args.mask) if args.mask else None
    read = tuple(getattr(readings, name)() for name in args.read.split(",")) if args.read else None
    allowed = None if mask is None else mask.dense(shape[2])
    return [Row(f"{args.mask or 'full'} {shape}", {
        "ours": partial(ch.attend, q, k, v, mask, read=read),
        "SDPA": partial(F.scaled_dot_product_attention, q, k, v, attn_mask=allowed),
        "eager": partial(eager, q, k, v, allowed)}, dtype=q.dtype)]  # fmt: skip


def all_rows(quick: bool) -> list[Row]:
    """The table."""
    f32, bf16 = torch.float32, torch.bfloat16
    long = [(1, 12, 1024, 64), (1, 4, 1024, 128)] + (
        [] if quick else [(1, 12, 4096, 64), (1, 6, 4096, 128), (1, 4, 8192, 64)]
    )
    return [
        *plain_rows(long if not quick else [*long, (1, 2, 4096, 64)], [f32, bf16]),
        *mask_rows(4096, 4 if quick else 12),
        *backward_rows(long[:2] if quick else long[:3], [f32, bf16]),
        *decode_rows([4096] if quick else [4096, 32768], [f32, bf16]),
        *small_rows(),
        *layer_rows(),
    ]


def write(about: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Keep the figures as data, and as a page made of it."""
    data = ROOT / "benchmarks" / "results" / "native.json"
    data.parent.mkdir(exist_ok=True)
    data.write_text(json.dumps({"machine": about, "rows": found}, indent=1) + "\n")
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    page = ROOT / "docs" / "performance.md"
    page.write_text(f"{PAGE.strip()}\n\n{facts}\n\n{HEAD}\n" + "\n".join(map(line, found)) + "\n")
    print(f"Wrote {data.relative_to(ROOT)} and {page.relative_to(ROOT)}")


PAGE = """
# How fast it is

Made by `python benchmarks/native.py --write`, on the machine and the commit below. A ratio above 1
is how many times longer the other takes; below 1 we lose. "of FMA peak" is the share of the
multiply-adds that this machine does when it does nothing else, measured in the same run. Goals are
those the project set itself on another machine; where SDPA itself reaches a large share of the
peak, some of them are beyond what any kernel can reach.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--shape", help="batch,head,positions,head_dim")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--mask", help="a mask expression")
    parser.add_argument("--read", help="names of readings that need no argument, with commas")
    args = parser.parse_args()
    if _kernel._native is None:
        raise SystemExit("the compiled kernel is not there: install clearhead with a C++ compiler")
    global CLOCK
    if args.clock == "cpu":
        CLOCK = time.process_time
    if args.threads or args.clock == "cpu":
        torch.set_num_threads(args.threads or 1)
    peaks = limits()
    about = machine(peaks)
    print("\n".join(f"{name}: {value}" for name, value in about.items()), HEAD, sep="\n")
    found = []
    for row in own_row(args) if args.shape else all_rows(args.quick):
        if args.only in row.name:
            measure(row, args.rounds, 4 if args.quick else 20)
            found.append(summary(row, peaks))
            print(line(found[-1]), flush=True)
    if args.write:
        write(about, found)


if __name__ == "__main__":
    main()
