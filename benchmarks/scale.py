"""A model of the cost of attention over ranks, from rates of one machine and stated links.

    python benchmarks/scale.py            # print the tables
    python benchmarks/scale.py --measure  # results/scale.json: from results/run.json, and a plan
    python benchmarks/scale.py --plans    # what plans send alone: the rates stay as they are
    python benchmarks/scale.py --write    # the tables into docs/scale.md

Nothing here is timed on more than one machine. The rates are those that `benchmarks/run.py` has
measured; links and the rate of an accelerator are stated. `tests/test_scale.py` compares the page
with the formulas, and the formulas with plans and with what processes allocate.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import page
import table
from clearhead import masks, readings
from clearhead._core import Sizes
from clearhead.distributed.sequence.balance import make_plan
from clearhead.distributed.sequence.plan import Costs, Shares

HERE = Path(__file__).parent
RATES, RESULT = HERE / "results" / "run.json", HERE / "results" / "scale.json"
PAGE = HERE.parent / "docs" / "scale.md"
WORK = "causal (1, 12, 4096, 64)"
LENGTHS = (8_192, 32_768, 131_072, 1_048_576, 10_485_760)
RANKS = (1, 2, 4, 8, 64, 1024)


@dataclass(frozen=True)
class Layer:
    """One attention layer under a causal mask, in a dtype of two bytes."""

    name: str
    heads: int
    source_heads: int
    width: int
    layers: int
    parameters: float
    itemsize: int = 2


@dataclass(frozen=True)
class Machine:
    """A rank: operations a second of attention, bytes a second to its peers, bytes of memory."""

    name: str
    short: str
    forward: float
    backward: float
    link: float
    latency: float
    memory: float


LAYERS = (
    Layer("GPT-2 small", 12, 12, 64, 12, 124e6),
    Layer("Llama 3 8B", 32, 8, 128, 32, 8.03e9),
)
# Links that are stated: bytes a second in one direction, and seconds of a message.
ETHERNET, INFINIBAND = (1.25e9, 50e-6), (50e9, 10e-6)
# An accelerator that is stated, with its memory: attention in bfloat16, forward and backward.
STATED, CARD = (500e12, 400e12), 141e9
# Hours that a rank runs between two losses of it: about a failure a day in a thousand ranks.
BETWEEN = 24_000
READINGS = (readings.Weights(), readings.TopK(8), readings.Entropy(), readings.BlockMap(64))


def machines(measured: dict[str, Any]) -> tuple[Machine, Machine]:
    """The measured machine on Ethernet, and a stated accelerator on InfiniBand."""
    rates = (measured["forward"], measured["backward"])
    card = "a stated accelerator on 400 Gbit/s InfiniBand"
    return (
        Machine(
            "the measured CPU on 10 Gbit/s Ethernet", "CPU", *rates, *ETHERNET, measured["memory"]
        ),
        Machine(card, "accelerator", *STATED, *INFINIBAND, CARD),
    )


def operations(layer: Layer, length: int) -> float:
    """Of a causal forward: two products of half of all edges, two operations a multiply-add."""
    return 4 * 0.5 * length**2 * layer.heads * layer.width


def sent(layer: Layer, length: int, ranks: int) -> float:
    """Bytes that a rank sends in a ring: its keys and values to each other rank."""
    return (ranks - 1) * length / ranks * 2 * layer.source_heads * layer.width * layer.itemsize


def over_ring(layer: Layer, ranks: int) -> float:
    """What the busiest rank sends of a causal forward, over `sent`, as calls of any length plan it.

    A rank sends less where it has no later ranks or ranks take whole heads, and more where few
    ranks give each other many rows.
    """
    if ranks == 1:
        return 1.0
    each, group = (64,) * ranks, layer.heads // layer.source_heads
    sizes = Sizes(1, layer.heads, sum(each), sum(each))
    width = layer.width * layer.itemsize
    costs = Costs(group * width, group * (width + 8), 2 * width)
    shares = Shares(sizes, layer.source_heads, each, each)
    return max(make_plan(masks.causal(), shares, costs).sent()) / sent(layer, sizes.source, ranks)


def rows_of_others(ranks: int) -> float:
    """The share of rows that the first rank computes for others, to even out causal work.

    It has half a share of edges for each row, the mean rank half of all positions, and the rows of
    the last rank all of them.
    """
    return 0.5 - 0.5 / ranks


def held(layer: Layer, length: int, ranks: int, given: float | None = None) -> float:
    """Bytes of a rank in a forward: its tensors, those of a stage, and what it computes of others.

    Query, key, value and context; two pieces of keys and values, an eighth each; the context in
    float32 where it is not that already, its log-sum-exp in float64, and strips of an eighth of it
    that are merged in float64. `given` is the share of rows that a rank computes for others, to
    even out the work: of these it holds queries, contexts and log-sum-exps, and of more than two
    ranks it relays keys and values.
    """
    both = layer.heads + layer.source_heads
    own = 2 * both * layer.width * layer.itemsize
    given = rows_of_others(ranks) if given is None else given
    pieces = (
        (2 / 8 + (given > 0 and ranks > 2)) * 2 * layer.source_heads * layer.width * layer.itemsize
    )
    row = layer.heads * (layer.width * 4 * (layer.itemsize < 4) + 8)
    strips = layer.heads * layer.width * (layer.itemsize + 8) / 8
    others = given * layer.heads * (layer.width * (layer.itemsize + 4) + 8)
    return length / ranks * (own + (pieces if ranks > 1 else 0) + row + strips + others)


def message_of(machine: Machine, layer: Layer, length: int, ranks: int, over: float = 1.0) -> float:
    """Seconds of what a rank sends in a step, where it sends `over` times what a ring does."""
    return over * sent(layer, length, ranks) / (ranks - 1) / machine.link + machine.latency


def seconds(
    machine: Machine, layer: Layer, length: int, ranks: int, plan: float, over: float = 1.0
) -> float:
    """Of a forward of a layer: each step takes its work or its message, whichever is longer.

    `plan` is the time that it takes to plan a pair of ranks.
    """
    work = operations(layer, length) / ranks / machine.forward
    if ranks == 1:
        return work
    message = message_of(machine, layer, length, ranks, over)
    return max(work / ranks, message) * (ranks - 1) + work / ranks + plan * ranks**2


def least_share(machine: Machine, layer: Layer) -> float:
    """How many positions a rank needs for the work of a step to take as long as its message."""
    # Of a pair: 2 share^2 heads width operations, and 2 share source_heads width itemsize bytes.
    return layer.source_heads * layer.itemsize * machine.forward / (layer.heads * machine.link)


def training(parameters: float, ranks: int, sharded: bool) -> tuple[float, float]:
    """Bytes of weights, gradients and Adam's averages in float32, and bytes sent a step, of a rank.

    DDP reduces the gradients, FSDP gathers the weights twice and scatters the gradients.
    """
    share = 16 * parameters / (ranks if sharded else 1)
    return share, (3 if sharded else 2) * (ranks - 1) / ranks * 4 * parameters


def lasting(hours: float, ranks: int, between: float) -> float:
    """The chance that no rank is lost in so many hours, of ranks that run `between` hours each."""
    return math.exp(-hours * ranks / between)


# --- the tables -----------------------------------------------------------------------------------


def tables(measured: dict[str, Any]) -> str:
    """Everything on the page that is computed."""
    parts = [_rates(measured)]
    for layer in LAYERS:
        shape = f"{layer.heads} query heads, {layer.source_heads} source heads of {layer.width}"
        over = {int(n): x for n, x in measured["over_ring"][layer.name].items()}
        head = f"### A layer of {layer.name}: {shape}, bfloat16, causal\n\n"
        parts.append(head + _sizes(layer, over))
        for machine in machines(measured):
            parts.append(
                f"Seconds of a forward, each rank {machine.name}:\n\n"
                + _times(machine, layer, over)
            )
    parts.append("### What breaks first\n\n" + _limits(measured))
    parts.append("### Training: bytes of a rank\n\n" + _trainings())
    parts.append("### Records of a layer on the rank that gathers them\n\n" + _records())
    return "\n\n".join(parts)


def _row(*cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _head(*cells: Any) -> list[str]:
    return [_row(*cells), "|" + "---|" * len(cells)]


def _length(length: int) -> str:
    return f"{length / 2**20:.0f}M" if length >= 2**20 else f"{length // 1024}k"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5 or unit == "PB":
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError


def _time(given: float) -> str:
    if given >= 86400:
        return f"{given / 86400:.3g} d"
    if given >= 3600:
        return f"{given / 3600:.3g} h"
    if given >= 99.5:
        return f"{given:,.0f} s"
    return f"{given:.3g} s" if given >= 1 else f"{given * 1000:.3g} ms"


def _rates(measured: dict[str, Any]) -> str:
    """What the tables are made of."""
    own, stated = machines(measured)
    lines = _head("", "forward", "backward", "link, one direction", "message", "memory")
    lines += [
        _row(
            x.name, f"{x.forward / 1e9:,.0f} GFLOP/s", f"{x.backward / 1e9:,.0f} GFLOP/s",
            f"{_bytes(x.link)}/s", f"{x.latency * 1e6:.0f} us", _bytes(x.memory),
        )
        for x in (own, stated)
    ]  # fmt: skip
    about = measured["machine"]
    return (
        "\n".join(lines) + f"\n\nMeasured: {about['machine']}, {about['threads']} threads, "
        f"`{WORK}` in bfloat16 by `benchmarks/run.py`, commit {about['commit']}, {about['date']}; "
        f"{measured['plan'] * 1e6:.0f} us to plan a pair of ranks, once for a mask and its sizes. "
        f"Five readings take {measured['readings']:.2f} times as long as none."
    )


def _sizes(layer: Layer, over: dict[int, float]) -> str:
    """Bytes that a rank sends, and holds."""
    lines = _head("T", *(f"{n:,} ranks" if n > 1 else "1 rank" for n in RANKS))
    for length in LENGTHS:
        cells = (
            f"{_bytes(over[n] * sent(layer, length, n))} sent, "
            f"{_bytes(held(layer, length, n))} held"
            for n in RANKS
        )
        lines.append(_row(_length(length), *cells))
    return "Bytes of a rank:\n\n" + "\n".join(lines)


def _times(machine: Machine, layer: Layer, over: dict[int, float]) -> str:
    """Times, and whether the link takes them and not the work."""
    lines = _head("T", *(f"{n:,}" for n in RANKS))
    for length in LENGTHS:
        cells = []
        for ranks in RANKS:
            took = seconds(machine, layer, length, ranks, 0.0, over[ranks])
            work = operations(layer, length) / ranks**2 / machine.forward
            late = ranks > 1 and message_of(machine, layer, length, ranks, over[ranks]) > work
            why = " link" if late else ""
            full = " memory" if held(layer, length, ranks) > machine.memory else ""
            cells.append(_time(took) + why + full)
        lines.append(_row(_length(length), *cells))
    return "\n".join(lines)


def whole(machine: Machine, layer: Layer) -> float:
    """Seconds of the work of all layers, forward and backward, at the largest of the sizes."""
    done = layer.layers * operations(layer, LENGTHS[-1]) / RANKS[-1]
    return done * (1 / machine.forward + 2.5 / machine.backward)


def _limits(measured: dict[str, Any]) -> str:
    """The limits of each machine, in numbers."""
    pairs = [(x, layer) for layer in LAYERS for x in machines(measured)]
    rows = {
        "positions of a rank below which its link is the limit": lambda x, layer: (
            f"{least_share(x, layer):,.0f}"
        ),
        "positions of a rank whose one layer fills its memory": lambda x, layer: (
            f"{x.memory / held(layer, 64, 64):,.0f}"
        ),
        "ranks at which the first plan takes a second": lambda x, layer: (
            f"{measured['plan'] ** -0.5:,.0f}"
        ),
        "10M positions, 1,024 ranks, all layers, forward and backward": lambda x, layer: _time(
            whole(x, layer)
        ),
        f"chance that no rank is lost meanwhile, each runs {BETWEEN:,} hours": lambda x, layer: (
            f"{lasting(whole(x, layer) / 3600, RANKS[-1], BETWEEN):.0%}"
        ),
    }
    lines = _head("", *(f"{layer.name}, {x.short}" for x, layer in pairs))
    lines += [_row(name, *(of(*pair) for pair in pairs)) for name, of in rows.items()]
    return "\n".join(lines)


def _trainings() -> str:
    """Memory and traffic of weights."""
    lines = _head(
        "model", "ranks", "DDP holds", "DDP sends a step", "FSDP holds", "FSDP sends a step"
    )
    for layer in LAYERS:
        for ranks in (1, 8, 64, 1024):
            found = [
                *training(layer.parameters, ranks, False),
                *training(layer.parameters, ranks, True),
            ]
            lines.append(_row(layer.name, f"{ranks:,}", *map(_bytes, found)))
    return "\n".join(lines)


def _records() -> str:
    """What `gather` brings to one rank, of one sample, by reading."""
    layer = LAYERS[1]
    lines = _head(f"T, {layer.heads} heads", *(repr(x) for x in READINGS))
    for length in LENGTHS:
        sizes = Sizes(1, layer.heads, length, length)
        lines.append(_row(_length(length), *(_bytes(x.nbytes(sizes)) for x in READINGS)))
    return "\n".join(lines)


# --- the rates ------------------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    """The rates in the results of `run.py`, and the processor time of plans."""
    found = json.loads(RATES.read_text(encoding="utf-8"))
    times = {row["work"]: row["ours"] for row in found["rows"] if row["dtype"] == "bfloat16"}
    gpt = Layer("", 12, 12, 64, 1, 0)
    done = operations(gpt, 4096)
    read = times[f"five readings, {WORK}"] / times[WORK]
    about = {name: found["machine"][name] for name in ("machine", "threads", "commit", "date")}
    return {
        "machine": about,
        "forward": done / times[WORK],
        "backward": 2.5 * done / times[f"backward, {WORK}"],
        "readings": read,
        "plan": _plan_of_a_pair(),
        "over_ring": plans(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def plans() -> dict[str, dict[str, float]]:
    """What plans send, over a ring, by the layer and the number of ranks."""
    return {x.name: {str(n): round(over_ring(x, n), 4) for n in RANKS} for x in LAYERS}


def _plan_of_a_pair(ranks: int = 64) -> float:
    """Seconds of a plan under a causal mask, for each pair of ranks."""
    each = (16_384,) * ranks
    sizes = Sizes(1, 32, sum(each), sum(each))
    begun = time.process_time()
    make_plan(masks.causal(), Shares(sizes, 8, each, each), Costs(1024, 1056, 512))
    return (time.process_time() - begun) / ranks**2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="measure, and write the results")
    parser.add_argument("--plans", action="store_true", help="plan again, and keep the rates")
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    arguments = parser.parse_args()
    if arguments.measure:
        table.write(RESULT, json.dumps(measure(), indent=1) + "\n")
    elif arguments.plans:
        known = json.loads(RESULT.read_text(encoding="utf-8"))
        table.write(RESULT, json.dumps({**known, "over_ring": plans()}, indent=1) + "\n")
    found = tables(json.loads(RESULT.read_text(encoding="utf-8")))
    if arguments.write:
        page.place(PAGE, found)
    else:
        print(found)


if __name__ == "__main__":
    main()
