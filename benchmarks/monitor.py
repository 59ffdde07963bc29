"""The cost of monitoring every head at every training step, beside what others do.

    python benchmarks/monitor.py [--lengths 256 1024 2048] [--models gpt llama] [--rounds 7]
    python benchmarks/monitor.py --write       # results/monitor.json, and docs/training.md
    python benchmarks/monitor.py --cpu-time    # of this process: other processes affect it little

A step is forward, backward and AdamW of a GPT (4 layers, width 256) or of a random Llama (8 layers,
width 512, grouped heads), with SDPA, on one sequence, and on as many of the shortest length as have
the tokens of the longest. The ways take turns in one process; a row has
the median, and the median of the ratios to the unmonitored step of the same round. The peers are
what other projects do: attention by hand with all weights, the product of query and key once more,
and 128 sampled queries. The error is the largest one of a head's largest logit and mean entropy,
relative to float64 on full weights. The memory is that of a process of its own: the peak of its
resident set over steps, beyond that of the unmonitored one, with an allocator that returns what is
freed at once (or else what it keeps differs by 15 MB from run to run).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
import machine
import page
import resident
import table

HERE = Path(__file__).parent
RESULT, PAGE = HERE / "results" / "monitor.json", HERE.parent / "docs" / "training.md"
VOCABULARY, SAMPLED = 100, 128
SDPA = F.scaled_dot_product_attention
HEAD = (
    "| model | sequences x T | way | ms a step | over unmonitored | MB over | error of max logit "
    "| of entropy | goal |\n|---|---|---|---|---|---|---|---|---|"
)
GOALS = {"monitor": 1.10, "monitor, through=True": 1.00}
# Tokens from which on a way has `--rounds` rounds.
SHORT = 1024
# The memory over the unmonitored step, at the longest length, in MB.
MEMORY = 16


def gpt(length: int) -> Any:
    """The teaching GPT, on SDPA."""
    module = importlib.import_module("clearhead.models.gpt")
    module.attend = lambda q, k, v, mask, read: F.scaled_dot_product_attention(  # type: ignore
        q, k, v, is_causal=True
    )
    return module.GPT(VOCABULARY, layers=4, heads=4, width=256, length=length, dropout=0.0)


def llama(length: int) -> Any:
    """A random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1376, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=length,
        use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {"gpt": gpt, "llama": llama}


class Training:
    """A model, its optimizer, and one step."""

    def __init__(self, kind: str, length: int, batch: int = 1) -> None:
        torch.manual_seed(0)
        self.model = MODELS[kind](length).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(VOCABULARY, (batch, length))

    def forward(self) -> Tensor:
        answer = self.model(self.tokens)
        return answer if isinstance(answer, Tensor) else answer.logits

    def step(self) -> None:
        logits = self.forward()
        F.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Peer:
    """Replaces SDPA by what another project does, and keeps (max logit, entropy) of each head."""

    def __init__(self, read: Callable[..., tuple[Tensor, Any]]) -> None:
        self.read = read
        self.found: list[Any] = []

    @contextlib.contextmanager
    def attached(self, training: Training) -> Iterator[Callable[[], list[Any]]]:
        F.scaled_dot_product_attention, self.found = self._sdpa, []
        try:
            yield self._taken
        finally:
            F.scaled_dot_product_attention = SDPA

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **given: Any) -> Tensor:
        context, numbers = self.read(q, k, v, *args, **given)
        self.found.append(numbers)
        return context

    def _taken(self) -> list[Any]:
        found, self.found = self.found, []
        return found


def scores_of(q: Tensor, k: Tensor, rows: Tensor | None = None) -> Tensor:
    """Causal scores, of all queries or of some."""
    rows = torch.arange(q.shape[2]) if rows is None else rows
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q[:, :, rows] @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.arange(k.shape[2]) > rows[:, None], -torch.inf)


def by_hand(q: Tensor, k: Tensor, v: Tensor, *args: Any, **given: Any) -> tuple[Tensor, Any]:
    """Eager attention, whose weights are there to be read."""
    scores = scores_of(q, k)
    weights = scores.softmax(-1)
    with torch.no_grad():
        numbers = scores.amax((0, 2, 3)), torch.special.entr(weights).sum(-1).mean((0, 2))
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), numbers


def again(q: Tensor, k: Tensor, v: Tensor, *args: Any, **given: Any) -> tuple[Tensor, Any]:
    """SDPA, and the product of query and key once more for its maximum, as SimpleTuner does."""
    with torch.no_grad():
        most = scores_of(q, k).amax((0, 2, 3))
    return SDPA(q, k, v, *args, **given), (most, None)


def sampled(q: Tensor, k: Tensor, v: Tensor, *args: Any, **given: Any) -> tuple[Tensor, Any]:
    """SDPA, and the weights of some queries, as Lingua's probe does."""
    rows = torch.randperm(q.shape[2])[:SAMPLED].sort().values
    with torch.no_grad():
        scores = scores_of(q, k, rows)
        entropy = torch.special.entr(scores.softmax(-1)).sum(-1).mean((0, 2))
        numbers = scores.amax((0, 2, 3)), entropy
    return SDPA(q, k, v, *args, **given), numbers


def exact(q: Tensor, k: Tensor, v: Tensor, *args: Any, **given: Any) -> tuple[Tensor, Any]:
    """The truth, in float64."""
    with torch.no_grad():
        _, numbers = by_hand(q.double(), k.double(), v.double())
    return SDPA(q, k, v, *args, **given), numbers


class Ours:
    """The monitor."""

    def __init__(self, through: bool) -> None:
        self.through = through

    @contextlib.contextmanager
    def attached(self, training: Training) -> Iterator[Callable[[], list[Any]]]:
        with ch.monitor(training.model, through=self.through, alarms=False) as monitor:
            with torch.no_grad():
                training.forward()  # the first one is checked row by row
            yield lambda: [(x[:, 0], x[:, 1]) for x in monitor.history[-1][1]]


class Nothing:
    """The unmonitored step."""

    @contextlib.contextmanager
    def attached(self, training: Training) -> Iterator[Callable[[], list[Any]]]:
        yield list


WAYS: dict[str, Any] = {
    "unmonitored": Nothing(),
    "monitor": Ours(False),
    "monitor, through=True": Ours(True),
    "eager with weights": Peer(by_hand),
    "QK^T once more": Peer(again),
    f"{SAMPLED} sampled queries": Peer(sampled),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        kind, length, way = arguments.child
        print(peak_of(kind, int(length), way))
        return
    facts = machine.facts(cpu_time=arguments.cpu_time)
    print(*(f"{name}: {fact}" for name, fact in facts.items()), HEAD, sep="\n", flush=True)
    rows: list[dict[str, Any]] = []
    for kind in arguments.models:
        for length, batch in sizes(arguments.lengths):
            for row in measured(kind, length, batch, arguments):
                print(line(row), flush=True)
                rows.append(row)
    if arguments.write:
        before = json.loads(RESULT.read_text("utf-8")) if RESULT.exists() else None
        if before and before["facts"]["commit"] == facts["commit"]:
            # Rows of other models that were measured at the same commit stay.
            rows = [x for x in before["rows"] if x["model"] not in arguments.models] + rows
        table.write(RESULT, json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
        about = ", ".join(f"{name} {fact}" for name, fact in facts.items())
        page.place(PAGE, "\n".join([f"Measured on: {about}.", "", HEAD, *map(line, rows)]))


def sizes(lengths: list[int]) -> list[tuple[int, int]]:
    """Each length with one sequence, and the shortest with the tokens of the longest."""
    batch = max(lengths) // min(lengths)
    each = [(length, 1) for length in lengths]
    return [*each[:1], (min(lengths), batch), *each[1:]] if batch > 1 else each


def measured(
    kind: str, length: int, batch: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each way."""
    training, clock = Training(kind, length, batch), time.perf_counter
    clock = time.process_time if arguments.cpu_time else clock
    training.step()
    errors = {name: error_of(way, training) for name, way in WAYS.items()}
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    rounds = arguments.rounds * max(1, SHORT // (length * batch))  # short steps scatter more
    for _ in range(rounds):
        for name, way in WAYS.items():  # interleaved, so that a change of the load affects all
            with way.attached(training):
                start = clock()
                training.step()
                times[name].append(clock() - start)
    longest = length == max(arguments.lengths)
    peaks = {name: child(kind, length, name, arguments.threads) for name in WAYS} if longest else {}
    found = []
    for name, each in times.items():
        ratios = [a / b for a, b in zip(each, times["unmonitored"], strict=True)]
        over = peaks[name] - peaks["unmonitored"] if peaks else None
        found.append({
            "model": kind, "length": length, "batch": batch, "way": name,
            "seconds": statistics.median(each),
            "times": statistics.median(ratios), "spread": spread(ratios), "over": over,
            "errors": errors[name],
        })  # fmt: skip
    return found


def spread(ratios: list[float]) -> float:
    """Half of the interquartile range."""
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (0, 0, 0)
    return (high - low) / 2


def error_of(way: Any, training: Training) -> list[float | None]:
    """The largest relative error of max logit and of entropy, over all heads."""
    found = []
    for each in (way, Peer(exact)):
        with each.attached(training) as taken:
            training.forward()
            found.append(taken())
    ours, right = found
    if not ours:
        return [None, None]
    errors: list[float | None] = []
    for at in (0, 1):
        pairs = [(a[at], b[at]) for a, b in zip(ours, right, strict=True)]
        some = all(a is not None for a, _ in pairs)
        each = [((a - b).abs() / b.abs()).max().item() for a, b in pairs] if some else []
        errors.append(max(each) if some else None)
    return errors


def child(kind: str, length: int, way: str, threads: int) -> float:
    """The peak of a process of its own, in MB."""
    command = [sys.executable, __file__, "--child", kind, str(length), way]
    command += ["--threads", str(threads)]
    returning = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | returning
    )
    return float(done.stdout)


def peak_of(kind: str, length: int, name: str) -> float:
    """The peak of the resident set over three steps, in MB."""
    training = Training(kind, length)
    training.step()
    with WAYS[name].attached(training):
        training.step()
        resident.forget_peak()
        training.step()
        training.step()
        return resident.peak() / 1e6


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    over = "" if row["over"] is None else f"{row['over']:.0f}"
    times = f"{row['times']:.2f} ± {row['spread']:.2f}"
    errors = ["" if x is None else f"{x:.0e}" for x in row["errors"]]
    return (
        f"| {row['model']} | {row['batch']} x {row['length']} | {row['way']} "
        f"| {1e3 * row['seconds']:.0f} | {times} | {over} | {' | '.join(errors)} "
        f"| {goal(row)} |"
    )


def goal(row: dict[str, Any]) -> str:
    """The goals of a way, and whether they are met."""
    if row["way"] not in GOALS:
        return ""
    most = GOALS[row["way"]]
    words = [f"{most:.2f}x: {'met' if row['times'] <= most else '**missed**'}"]
    if row["over"] is not None:
        words.append(f"{MEMORY} MB: {'met' if row['over'] <= MEMORY else '**missed**'}")
    return ", ".join(words)


if __name__ == "__main__":
    main()
