"""Measure clearhead beside other implementations on this machine: time, error and memory.

    python benchmarks/run.py                    every row; about ten minutes on two cores
    python benchmarks/run.py --quick            smaller sizes, under two minutes
    python benchmarks/run.py --write            and write results/run.json and docs/performance.md
    python benchmarks/run.py --only decode      some groups of rows
    python benchmarks/run.py --shape 1,12,4096,64 --dtype bfloat16 --mask "causal & window(256)" \\
        --read "Entropy(), TopK(8)"             your own case, beside every peer that supports it

The ways in a row must return the same result, or the run stops; they are then timed in turns in one
process, together with the machine's own peak. `--cpu-time` measures processor time on one thread
instead of wall time, for a machine that is shared.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import cases
import layers
import machine
import processes
import table
from measure import Row, Settings, check, measure, summary

ROOT = machine.HERE.parent
RESULT, PAGE = machine.HERE / "results" / "run.json", ROOT / "docs" / "performance.md"
F32, BF16 = torch.float32, torch.bfloat16
EVERYONE = ("SDPA, bool tensor", "eager", "flex", "onnxruntime")


def attend_rows(on: Settings) -> Iterator[Row]:
    yield from cases.attend([(1, 12, 1024, 64)], [F32, BF16], EVERYONE)
    yield from cases.attend([(1, 4, 1024, 128)], [F32, BF16])
    if on.quick:
        yield from cases.attend([(1, 2, 4096, 64)], [F32, BF16])
        return
    yield from cases.attend([(1, 12, 4096, 64)], [F32, BF16], EVERYONE)
    long = [(1, 6, 4096, 128), (1, 4, 8192, 64), (1, 2, 8192, 128)]
    yield from cases.attend(long, [F32, BF16])


def read_rows(on: Settings) -> Iterator[Row]:
    long = [(1, 12, 4096, 64), (1, 6, 4096, 128), (1, 12, 8192, 64)]
    yield from cases.read([(1, 2, 4096, 64)] if on.quick else long, [F32, BF16])
    yield from cases.weights((1, 12, 1024, 64))


def mask_rows(on: Settings) -> Iterator[Row]:
    yield from cases.masked((1, 4 if on.quick else 12, 4096, 64))


def backward_rows(on: Settings) -> Iterator[Row]:
    shapes = [(1, 12, 1024, 64), (1, 4, 1024, 128)] + [(1, 12, 4096, 64)] * (not on.quick)
    yield from cases.backward(shapes, [F32, BF16])
    yield from cases.dropout((1, 12, 1024, 64))


def decode_rows(on: Settings) -> Iterator[Row]:
    yield from cases.decode([4096, 32768] if on.quick else [4096, 8192, 16384, 32768], [F32, BF16])


def small_rows(on: Settings) -> Iterator[Row]:
    yield from cases.small()


def layer_rows(on: Settings) -> Iterator[Row]:
    yield from layers.multihead()
    yield from layers.training()


def avx2_rows(on: Settings) -> Iterator[Row]:
    yield from cases.isa([(1, 12, 1024, 64), (1, 4, 1024, 128)], "avx2")


def tiled_rows(on: Settings) -> Iterator[Row]:
    yield from cases.tiled((1, 12, 1024 if on.quick else 4096, 64))


def memory_rows(on: Settings) -> Iterator[Row]:
    yield from processes.memory([2048] if on.quick else [2048, 4096, 8192])


def start_rows(on: Settings) -> Iterator[Row]:
    clock = processes.processor_time if on.cpu_time else time.perf_counter
    yield from processes.start(1 if on.quick else 5, clock)


GROUPS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "attend": attend_rows,
    "read": read_rows,
    "masks": mask_rows,
    "backward": backward_rows,
    "decode": decode_rows,
    "small": small_rows,
    "layers": layer_rows,
    "avx2": avx2_rows,
    "tiled": tiled_rows,
    "memory": memory_rows,
    "start": start_rows,
}


def options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument("--only", choices=GROUPS, nargs="+", help="some groups of rows")
    parser.add_argument("--threads", type=int, help="torch's threads (1 with --cpu-time)")
    parser.add_argument("--cpu-time", action="store_true", help="processor time on one thread")
    parser.add_argument("--rounds", type=int, help="how many rounds (9; quick: 5)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name} and {PAGE.name}")
    parser.add_argument("--out", type=Path, help="write the results as JSON to this file")
    parser.add_argument("--shape", type=shape, help="batch,head,position,head_dim of your own case")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--mask", help='its mask, such as "causal & window(256)"')
    parser.add_argument("--read", help='its readings, such as "Entropy(), TopK(8)"')
    parser.add_argument("--impl", help="its implementation (the first that supports it)")
    found = parser.parse_args(given)
    if found.write and (found.only or found.shape):
        parser.error("--write keeps the whole table: leave out --only and --shape, or use --out")
    if found.shape is None and (found.mask or found.read or found.impl):
        parser.error("--mask, --read and --impl describe your own case: give its --shape")
    return found


def shape(text: str) -> tuple[int, ...]:
    sizes = tuple(map(int, text.split(",")))
    if len(sizes) != 4 or min(sizes) < 1:
        raise ValueError(text)
    return sizes


def settings_of(given: argparse.Namespace) -> Settings:
    return Settings(
        quick=given.quick, rounds=given.rounds or (5 if given.quick else 9),
        seconds=1.0 if given.quick else 5.0, cpu_time=given.cpu_time,
        shape=given.shape, dtype=given.dtype, mask=given.mask, read=given.read, impl=given.impl,
    )  # fmt: skip


def measured(rows: Iterator[Row], settings: Settings) -> Iterator[dict[str, Any]]:
    """Check, time and print row by row; rows are created one at a time."""
    for row in rows:
        if not row.samples:
            check(row)
            measure(row, settings)
        found = summary(row)
        print(table.line(found), flush=True)
        yield found


def main(given: list[str] | None = None) -> None:
    args = options(given)
    settings = settings_of(args)
    if args.threads or args.cpu_time:
        torch.set_num_threads(args.threads or 1)
    torch.manual_seed(0)
    begin = time.monotonic()
    about = {**machine.facts(args.cpu_time), **machine.limits(settings.clock)}
    print(*(f"{name}: {value}" for name, value in about.items()), table.HEAD, sep="\n")
    groups = {name: GROUPS[name](settings) for name in args.only or GROUPS}
    if args.shape:
        groups = {"own": cases.own(settings)}
    try:
        found = {name: list(measured(rows, settings)) for name, rows in groups.items()}
    except ValueError as reason:
        print(f"run.py: {reason}", file=sys.stderr)
        raise SystemExit(2) from None
    about["took"] = f"{time.monotonic() - begin:.0f} s"
    print(f"took: {about['took']}")
    if args.write:
        command = shlex.join(["python", "benchmarks/run.py", *(given or sys.argv[1:])])
        table.save(about, found, RESULT)
        table.write(PAGE, table.page(about, found, command))
    if args.out:
        table.save(about, found, args.out)


if __name__ == "__main__":
    main()
