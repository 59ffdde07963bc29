"""What it takes to watch SmolLM2-135M: memory and time over the unwatched forward.

    python benchmarks/watch.py DIRECTORY [--lengths 4096 8192] [--rounds 1] [--threads 1]

Each number comes from a process of its own, so that no row profits from another's memory. Memory
is the highest resident set during the forward, over that of the unwatched one; logits are made for
the last position only and no cache is kept, so that neither hides what watching takes. Times are
CPU times of all threads: what else runs on the machine counts little. glibc keeps freed memory
between what records hold; with MALLOC_MMAP_THRESHOLD_=1048576 set it does not, and the rows show
what watching itself keeps. Read are entropy, the top 8,
received attention and a block map (32 x 32) of all 270 heads.
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
from pathlib import Path
from typing import Any

CELLS, TOP = 32, 8
# How it is done, and up to which length it is tried: eager keeps 270 maps of T x T numbers.
WAYS = {
    "unwatched": 1 << 20,
    "watch": 1 << 20,
    "watch, through=True": 1 << 20,
    "eager, a hook a layer": 4096,
    "eager, output_attentions": 2048,
}
# What is aimed at: (most MB over the unwatched forward, most times its time).
GOALS = {
    ("watch", 4096): "150 MB, 1.6x",
    ("watch, through=True", 4096): "150 MB, 1.0x",
    ("watch", 8192): "under 2 GB in all",
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
    parser.add_argument("--child", nargs=2, metavar=("WAY", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        way, length = arguments.child
        print(json.dumps(child(arguments.directory, way, int(length), arguments.threads)))
        return
    header(arguments.threads)
    for length in arguments.lengths:
        table(arguments, length)


def header(threads: int) -> None:
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    print(f"{cpu()}, {threads} threads, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
          f"python {platform.python_version()}, commit {commit.stdout.strip()}")  # fmt: skip
    if threshold := os.environ.get("MALLOC_MMAP_THRESHOLD_"):
        print(f"MALLOC_MMAP_THRESHOLD_={threshold}")
    print(f"{'T':>5}  {'':<26} {'CPU s':>8} {'ratio':>6} {'spread':>6} {'peak MB':>8} "
          f"{'over':>7} {'check':>8}  goal")  # fmt: skip


def cpu() -> str:
    found = Path("/proc/cpuinfo").read_text(encoding="utf-8") if sys.platform == "linux" else ""
    names = [line.partition(": ")[2] for line in found.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def table(arguments: argparse.Namespace, length: int) -> None:
    ways = [way for way in arguments.ways if length <= WAYS[way]]
    ways = ["unwatched", *(way for way in ways if way != "unwatched")]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way in ways:  # interleaved, so that a change of the machine hits all alike
            runs[way].append(measured(arguments, way, length))
    plain = [run["seconds"] for run in runs["unwatched"]]
    least = min(run["peak"] for run in runs["unwatched"])
    for way in ways:
        if any("error" in run for run in runs[way]):
            print(f"{length:>5}  {way:<26} {runs[way][0]['error']}")
            continue
        seconds = [run["seconds"] for run in runs[way]]
        ratios = [a / b for a, b in zip(seconds, plain, strict=True)]
        peak = max(run["peak"] for run in runs[way])
        print(f"{length:>5}  {way:<26} {statistics.median(seconds):>8.1f} "
              f"{statistics.median(ratios):>6.2f} {max(ratios) - min(ratios):>6.2f} {peak:>8.0f} "
              f"{peak - least:>7.0f} {runs[way][0]['check']:>8.0e}  "
              f"{GOALS.get((way, length), '')}", flush=True)  # fmt: skip


def measured(arguments: argparse.Namespace, way: str, length: int) -> dict[str, Any]:
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
    """Run one forward in one way; CPU seconds and the peak of resident memory."""
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
        run(model, tokens[:, :64])  # what is imported and allocated once
        forget_peak()
        start = time.process_time()
        values, check = run(model, tokens)
        seconds = time.process_time() - start
    assert way == "unwatched" or len(values) == 30, len(values)
    return {"seconds": seconds, "peak": peak(), "check": check}


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak() -> float:
    """Give the highest resident set since `forget_peak`, in MB (10^6 bytes)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("this benchmark needs Linux: /proc/self/status has no VmHWM")


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
    """Take the same readings from a whole map, as a careful user would: nothing larger is kept."""
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
