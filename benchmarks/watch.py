"""The cost of watching SmolLM2-135M: memory and time relative to the unwatched forward.

    python benchmarks/watch.py DIRECTORY [--lengths 4096 8192] [--rounds 3] [--threads 1]
    python benchmarks/watch.py DIRECTORY --write    # results/watch.json, and the table of the docs

Each number comes from a process of its own, so that rows do not share memory. Memory is the peak of
the resident set from the forward until all values have been read, beyond that of the unwatched
forward. Logits are computed for the last position only and no cache is kept, so that neither hides
the cost of watching. Times are CPU times of all threads, which other processes affect little. The
readings are the entropy, the top 8, received attention and a block map (32 x 32) of all 270 heads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import machine
import page
import resident
import table

CELLS, TOP = 32, 8
# The ways, and the longest sequence of each: eager keeps 270 maps of T x T numbers.
WAYS = {
    "unwatched": 1 << 20,
    "watch": 1 << 20,
    "watch, through=True": 1 << 20,
    "eager, a hook a layer": 4096,
    "eager, output_attentions": 2048,
}
HERE = Path(__file__).parent
RESULT, PAGE = HERE / "results" / "watch.json", HERE.parent / "docs" / "watch.md"


class Limit(NamedTuple):
    """The goal: MB beyond the unwatched forward, time relative to it, MB in all."""

    over: float | None = None
    times: float | None = None
    peak: float | None = None

    def met(self, row: dict[str, Any]) -> bool:
        return all(most is None or row[name] <= most for name, most in self._asdict().items())

    def __str__(self) -> str:
        words = {"over": "{:.0f} MB over", "times": "{:.1f}x", "peak": "{:.0f} MB in all"}
        given = self._asdict().items()
        return ", ".join(words[name].format(most) for name, most in given if most is not None)


LIMITS = {
    ("watch", 4096): Limit(over=150, times=1.6),
    ("watch, through=True", 4096): Limit(over=150, times=1.0),
    ("watch", 8192): Limit(peak=2000),
    ("watch, through=True", 8192): Limit(peak=2000),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", help="SmolLM2-135M, as transformers loads it")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("WAY", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        way, length = arguments.child
        print(json.dumps(child(arguments.directory, way, int(length), arguments.threads)))
        return
    facts = {**machine.facts(cpu_time=True), "threads": arguments.threads}
    print(*(f"{name}: {fact}" for name, fact in facts.items()), HEAD, sep="\n", flush=True)
    rows = []
    for length in arguments.lengths:
        for row in measured(arguments, length):
            print(line(row), flush=True)
            rows.append(row)
    if arguments.write:
        write({"facts": facts, "rows": rows})


HEAD = (
    "| T | way | CPU s | relative to unwatched | peak MB | MB over | check | limit |\n"
    "|---|---|---|---|---|---|---|---|"
)


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    start = f"| {row['length']} | {row['way']} |"
    if "error" in row:
        return f"{start} {row['error']} | | | | | |"
    limit = row["limit"] and f"{row['limit']}: {'met' if row['met'] else '**missed**'}"
    spread = f" ± {row['spread']:.2f}" if row["spread"] else ""
    check = f"{row['check']:.0e}" if row["check"] else ""
    return (
        f"{start} {row['seconds']:.1f} | {row['times']:.2f}{spread} | {row['peak']:.0f} "
        f"| {row['over']:.0f} | {check} | {limit} |"
    )


def write(found: dict[str, Any]) -> None:
    """Save the results, and write the table into the docs."""
    table.write(RESULT, json.dumps(found, indent=1) + "\n")
    facts = ", ".join(f"{name} {fact}" for name, fact in found["facts"].items())
    page.place(PAGE, "\n".join([f"Measured on: {facts}.", "", HEAD, *map(line, found["rows"])]))


def measured(arguments: argparse.Namespace, length: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way; each run is a process of its own."""
    asked = ["unwatched", *(way for way in arguments.ways if way != "unwatched")]
    ways = [way for way in asked if length <= WAYS[way]]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way in ways:  # interleaved, so that a change of the load affects all of them
            runs[way].append(turn(arguments, way, length))
    for way in asked:
        row = {"length": length, "way": way}
        if way in runs:
            yield row | summary(runs[way], runs["unwatched"], LIMITS.get((way, length)))
        else:
            yield row | {"error": "not tried: it takes too much memory"}


def summary(
    runs: list[dict[str, Any]], plain: list[dict[str, Any]], limit: Limit | None
) -> dict[str, Any]:
    """Median times; the highest memory, relative to the lowest of the unwatched runs."""
    for run in (*runs, *plain):
        if "error" in run:
            return run
    pairs = zip(runs, plain, strict=True)
    times = [one["seconds"] / other["seconds"] for one, other in pairs]
    peak = max(run["peak"] for run in runs)
    row = {
        "seconds": statistics.median(run["seconds"] for run in runs),
        "times": statistics.median(times),
        "spread": (max(times) - min(times)) / 2,
        "peak": peak,
        "over": peak - min(run["peak"] for run in plain),
        "check": runs[0]["check"],
        "runs": runs,
    }
    return row | {"limit": str(limit or ""), "met": limit.met(row) if limit else None}


def turn(arguments: argparse.Namespace, way: str, length: int) -> dict[str, Any]:
    command = [
        sys.executable, __file__, arguments.directory, "--threads", str(arguments.threads),
        "--child", way, str(length),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"died ({done.returncode})"]
        return {"error": last[0]}
    return json.loads(done.stdout.splitlines()[-1])


def child(directory: str, way: str, length: int, threads: int) -> dict[str, Any]:
    """Run one forward in one way; return CPU seconds and the peak of resident memory."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    eager = way.startswith("eager")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager" if eager else "sdpa"
    )
    some = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 49000, (1, length), generator=some)
    run = {
        "unwatched": unwatched,
        "watch": watched,
        "watch, through=True": through,
        "eager, a hook a layer": hooked,
        "eager, output_attentions": outputs,
    }[way]
    with torch.no_grad():
        run(model, tokens[:, :64])  # imports and one-time allocations
        resident.forget_peak()
        start = time.process_time()
        values, check = run(model, tokens)
        seconds = time.process_time() - start
    assert way == "unwatched" or len(values) == 30, len(values)
    return {"seconds": seconds, "peak": resident.peak() / 1e6, "check": check}


def forward(model: Any, tokens: Any, **more: Any) -> Any:
    return model(tokens, use_cache=False, logits_to_keep=1, **more)


def unwatched(model: Any, tokens: Any) -> tuple[list[Any], float]:
    forward(model, tokens)
    return [], 0.0


def watched(model: Any, tokens: Any, **how: Any) -> tuple[list[Any], float]:
    import clearhead as ch
    from clearhead import readings

    read = (readings.Entropy(), readings.TopK(TOP), readings.Received(), readings.BlockMap(CELLS))
    with ch.watch(model, read=read, **how) as seen:
        forward(model, tokens)
    return [record.value for record in seen], max(record.check or 0.0 for record in seen)


def through(model: Any, tokens: Any) -> tuple[list[Any], float]:
    return watched(model, tokens, through=True)


def statistics_of(weights: Any) -> tuple[Any, ...]:
    """Take the same readings from a whole map, and keep nothing larger."""
    import torch
    from torch.nn.functional import adaptive_avg_pool2d, adaptive_max_pool2d

    entropy = torch.special.entr(weights).sum(-1)
    cells = adaptive_avg_pool2d(weights, CELLS), adaptive_max_pool2d(weights, CELLS)
    return entropy, weights.topk(TOP), weights.sum(-2), cells


def hooked(model: Any, tokens: Any) -> tuple[list[Any], float]:
    values: list[Any] = []
    hook: Callable[..., None] = lambda *given: values.append(statistics_of(given[-1][1]))  # noqa: E731
    handles = [layer.self_attn.register_forward_hook(hook) for layer in model.model.layers]
    forward(model, tokens)
    for handle in handles:
        handle.remove()
    return values, 0.0


def outputs(model: Any, tokens: Any) -> tuple[list[Any], float]:
    maps = forward(model, tokens, output_attentions=True).attentions
    return [statistics_of(weights) for weights in maps], 0.0


if __name__ == "__main__":
    main()
