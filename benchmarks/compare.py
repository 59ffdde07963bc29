"""Time the same calls on two source trees, in turns: which of them became slower?

    python benchmarks/compare.py BEFORE AFTER [--rounds 15] [--only TEXT] [--model DIR]

BEFORE and AFTER are checkouts whose kernel is built in `src` (native/build.sh). Each runs in a
process of its own, on one thread, and is asked for one call at a time, in changing order. Printed
are the medians of the processor time, their ratio, and half the interquartile range relative to
each median; a row is marked where the ratio exceeds 1 by more than that and by more than 2%. With
`--model` the rows watch and cut a model of transformers in DIR. Exit code 1: a row is marked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LEAST = 0.02  # what is never called slower


class Case(NamedTuple):
    name: str
    run: Callable[[], Any]
    repeats: int = 1


# What a worker runs, with the public names of both trees alone.


def attend_cases() -> Iterator[Case]:
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield from context_cases(dtype, name)
        yield from reading_cases(dtype, name)
        yield from backward_cases(dtype, name)
    yield from small_cases()


def qkv(shape: tuple[int, ...], dtype: Any, grad: bool = False) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    return [tensor.requires_grad_(grad) for tensor in drawn]


def context_cases(dtype: Any, name: str) -> Iterator[Case]:
    import torch

    import clearhead as ch
    from clearhead import masks

    short, long = qkv((1, 4, 1024, 64), dtype), qkv((1, 2, 4096, 64), dtype)
    of = {"short": short, "wide": qkv((1, 3, 1024, 128), dtype), "long": long}
    for size, inputs in of.items():
        yield Case(f"full, {size}, {name}", lambda x=inputs: ch.attend(*x))
        yield Case(f"causal, {size}, {name}", lambda x=inputs: ch.attend(*x, masks.causal()))
    window = masks.window(256)
    documents = masks.document(torch.arange(4096) // 600) & masks.causal()
    sinks = window | masks.first(4) & masks.causal()
    for what, mask in (("window", window), ("documents", documents), ("window, sinks", sinks)):
        yield Case(f"{what}, long, {name}", lambda m=mask: ch.attend(*long, m))
    lower = torch.ones(1024, 1024, dtype=torch.bool).tril()
    yield Case(f"bool tensor, short, {name}", lambda: ch.attend(*short, lower))
    many = qkv((1, 12, 4096, 64), dtype)
    yield Case(f"decode, {name}", lambda: ch.attend(many[0][..., :1, :], *many[1:]), 5)
    batch = qkv((32, 8, 64, 32), dtype)
    yield Case(f"batch of 32, {name}", lambda: ch.attend(*batch), 3)


def reading_cases(dtype: Any, name: str) -> Iterator[Case]:
    import clearhead as ch
    from clearhead import masks, readings

    short, long = qkv((1, 4, 1024, 64), dtype), qkv((1, 2, 4096, 64), dtype)
    mass, causal = readings.Mass(masks.first(4)), masks.causal()
    five = (readings.Entropy(), readings.TopK(8), readings.Received(), mass, readings.BlockMap(32))
    others = (readings.TopK(64), readings.Distance(), readings.LogSumExp(), readings.Weights())
    yield Case(f"five, full, long, {name}", lambda: ch.attend(*long, read=five))
    yield Case(f"five, causal, long, {name}", lambda: ch.attend(*long, causal, read=five))
    for one in (*five, *others):
        case = f"{type(one).__name__}{getattr(one, 'k', '')}, short, {name}"
        yield Case(case, lambda r=one: ch.attend(*short, causal, read=r))


def backward_cases(dtype: Any, name: str) -> Iterator[Case]:
    import clearhead as ch
    from clearhead import masks

    inputs = qkv((1, 2, 1024, 64), dtype, grad=True)

    def step(mask: Any, dropout: float = 0.0) -> None:
        ch.attend(*inputs, mask, dropout=dropout).sum().backward()

    yield Case(f"forward and backward, full, {name}", lambda: step(None))
    yield Case(f"forward and backward, causal, {name}", lambda: step(masks.causal()))
    yield Case(f"forward and backward, dropout, {name}", lambda: step(masks.causal(), 0.1))


def small_cases() -> Iterator[Case]:
    import torch

    import clearhead as ch
    from clearhead import masks, readings

    small, tiny = qkv((1, 4, 64, 64), torch.float32), qkv((1, 1, 4, 3), torch.float32)
    causal = masks.causal()
    yield Case("(1, 4, 64, 64)", lambda: ch.attend(*small), 200)
    yield Case("(1, 1, 4, 3)", lambda: ch.attend(*tiny), 500)
    yield Case("(1, 1, 4, 3), new causal mask", lambda: ch.attend(*tiny, masks.causal()), 500)
    yield Case("(1, 1, 4, 3), same causal mask", lambda: ch.attend(*tiny, causal), 500)
    yield Case("(1, 1, 4, 3), weights", lambda: ch.attend(*tiny, read=readings.Weights()), 300)


def model_cases(directory: str) -> Iterator[Case]:
    import torch
    import transformers

    ids = torch.randint(0, 40000, (1, 200), generator=torch.Generator().manual_seed(0))
    for backend in ("sdpa", "eager"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation=backend, dtype=torch.float32
        )
        yield from watch_cases(model.eval(), ids, backend)


def watch_cases(model: Any, ids: Any, backend: str) -> Iterator[Case]:
    import torch

    import clearhead as ch
    from clearhead import masks, readings

    def run(around: Callable[[], Any] | None = None) -> None:
        with torch.no_grad():
            if around is None:
                model(ids)
                return
            with around() as seen:
                model(ids)
            if seen is not None and hasattr(seen, "notes") and len(seen):
                _ = seen[0].value

    first, heads = masks.first(1), [(3, 2), (4, 1), (20, 5)]
    edge = masks.edges([(150, 3)])
    around: dict[str, Callable[[], Any]] = {
        "watch, Entropy": lambda: ch.watch(model, read=readings.Entropy()),
        "watch, TopK(8)": lambda: ch.watch(model, read=readings.TopK(8)),
        "knockout, one edge": lambda: ch.knockout(model, edge),
        "knockout, all rows": lambda: ch.knockout(model, first),
        "knockout, all rows, one head": lambda: ch.knockout(model, first, heads=heads[:1]),
        "ablate, zero": lambda: ch.ablate(model, heads, how="zero"),
        "ablate, mean": lambda: ch.ablate(model, heads, how="mean"),
        "zero_weights, one layer": lambda: ch.zero_weights(model, first, layers=[5]),
    }
    yield Case(f"forward, {backend}", run)
    for name, make in around.items():
        yield Case(f"{name}, {backend}", lambda m=make: run(m))


def work(model: str | None) -> None:
    """Serve calls by name: print how long each takes, in nanoseconds of processor time."""
    import torch

    torch.set_num_threads(1)
    cases = {case.name: case for case in (model_cases(model) if model else attend_cases())}
    for case in cases.values():
        case.run()
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        case = cases[json.loads(line)]
        start = time.process_time_ns()
        for _ in range(case.repeats):
            case.run()
        print((time.process_time_ns() - start) / case.repeats, flush=True)


# What asks the two workers.


class Tree:
    """The worker of one source tree."""

    def __init__(self, path: Path, model: str | None) -> None:
        source = path.resolve() / "src"
        if not (source / "clearhead" / "__init__.py").is_file():
            raise SystemExit(
                f"compare: {path} is no checkout of clearhead: it has no src/clearhead"
            )
        command = [sys.executable, __file__, ".", ".", "--worker"]
        self.process = subprocess.Popen(
            command + (["--model", model] if model else []),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        )
        self.names: list[str] = json.loads(self.read())

    def read(self) -> str:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise SystemExit("compare: a worker ended; its error is printed above")
        return line

    def time(self, name: str) -> float:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(name) + "\n")
        self.process.stdin.flush()
        return float(self.read())


def spread(times: list[float]) -> float:
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle


def compare(given: argparse.Namespace) -> int:
    trees = [Tree(path, given.model) for path in (given.before, given.after)]
    names = [name for name in trees[0].names if name in trees[1].names and given.only in name]
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for turn in range(given.rounds):
        for name in names:
            for side in (0, 1) if turn % 2 else (1, 0):
                times[name][side].append(trees[side].time(name))
    return sum(line(name, *times[name]) for name in names) > 0


def line(name: str, before: list[float], after: list[float]) -> bool:
    """Print a row, and give whether it became slower."""
    medians = statistics.median(before), statistics.median(after)
    ratio, spreads = medians[1] / medians[0], (spread(before), spread(after))
    slower = ratio > 1 + max(*spreads, LEAST)
    told = "  ".join(f"{t / 1e3:10.1f} us ±{s:4.0%}" for t, s in zip(medians, spreads, strict=True))
    print(f"{name:44}{told}  {ratio:5.3f}{'  slower' * slower}", flush=True)
    return slower


def main() -> int:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--model", help="a directory with a model of transformers")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.model)
        return 0
    return compare(given)


if __name__ == "__main__":
    sys.exit(main())
