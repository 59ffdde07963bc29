"""What a call over ranks sends, computes and holds on each rank, beside the least there can be.

    python benchmarks/ring.py [--ranks 1 2 4 8] [--heads 8 --source-heads 2] [--positions 8192]
    python benchmarks/ring.py --backward            # forward and backward
    python benchmarks/ring.py --mask none           # or causal, the default

The ranks are processes of this machine in a gloo group. A row has the busiest rank of each kind:

- bytes sent, beside those of a ring, in which every rank sends its keys and values to all others
  (with the backward pass once more, and all gradients of keys and values): a ring leaves causal
  work as uneven as it is. A zig-zag ring evens it out by half of all positions on other ranks:
  where shares are consecutive, these travel there and their contexts (and gradients) back;
- edges computed, beside the mean;
- memory: the growth of the resident set over inputs, call and results, after a small call, beside
  that of one rank divided by their number. The results of the call are part of it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch import multiprocessing as mp
from torch.multiprocessing.spawn import spawn

import machine
import resident
from clearhead import distributed, masks
from clearhead.distributed.sequence import ring

HEAD = (
    "| ranks | MB sent | over a ring | over a zig-zag ring | work over mean | MB held "
    "| over one rank / N |\n|---|---|---|---|---|---|---|"
)
MASKS = {"none": None, "causal": masks.causal()}
# A float32, and the log-sum-exp of a row in float64.
NUMBER, LSE = 4, 8


class Counts:
    """The bytes that a rank sends, and the edges that it computes."""

    def __init__(self) -> None:
        self.sent, self.edges = 0, 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        send, compute = dist.isend, ring.attend_part

        def sending(x: Tensor, *args: Any, **options: Any) -> Any:
            self.sent += x.nbytes
            return send(x, *args, **options)

        def computing(problem: Any) -> Any:
            _, heads, query, source = problem.sizes
            mask = problem.mask
            count = query * source if mask is None else mask.count(query, source)
            self.edges += heads * count
            return compute(problem)

        dist.isend, ring.attend_part = sending, computing
        try:
            yield
        finally:
            dist.isend, ring.attend_part = send, compute


def call(options: argparse.Namespace, positions: int) -> None:
    """One call on random shares of so many positions, in all."""
    share = distributed.shard(torch.empty(positions, 0)).shape[0]
    q = torch.randn(1, options.heads, share, options.width, requires_grad=options.backward)
    k, v = (
        torch.randn(1, options.source_heads, share, options.width, requires_grad=options.backward)
        for _ in "kv"
    )
    context = distributed.attend(q, k, v, MASKS[options.mask])
    if options.backward:
        context.sum().backward()


def rank_of(rank: int, world: int, path: str, options: argparse.Namespace, found: Any) -> None:
    """One rank: its bytes, its edges and the growth of its memory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    call(options, 64 * world)
    dist.barrier()
    # First: what an earlier call has freed would be part of what is held before.
    resident.forget_peak()
    before = resident.peak()
    call(options, options.positions)
    held, counts = resident.peak() - before, Counts()
    with counts.counting():
        call(options, options.positions)
    found.put((counts.sent, counts.edges, held))
    dist.barrier()
    dist.destroy_process_group()


def measured(world: int, options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """What the ranks of a group have found."""
    with tempfile.TemporaryDirectory() as folder:
        found = mp.get_context("spawn").SimpleQueue()
        path = str(Path(folder) / "store")
        spawn(rank_of, (world, path, options, found), nprocs=world)
        return [found.get() for _ in range(world)]


def least(world: int, options: argparse.Namespace) -> tuple[float, float]:
    """The bytes that a rank sends in a ring, and in a zig-zag ring of consecutive shares."""
    share = options.positions / world * options.width * NUMBER
    sources, queries = 2 * share * options.source_heads, share * options.heads
    rows = options.positions / world * options.heads * LSE
    passes = 3 if options.backward else 1
    plain = sources * ((world - 1) * passes + options.backward)
    # Queries, keys, values, and back the contexts; then these again with the gradients.
    moved = 2 * queries + rows + sources
    if options.backward:
        moved += 3 * queries + 2 * rows + 2 * sources
    return plain, plain + moved / 2 * (world > 1)


def row(world: int, options: argparse.Namespace, alone: float | None) -> tuple[str, float]:
    """A row of the table, and the memory of the rank that holds most."""
    found = measured(world, options)
    sent, edges, held = (max(each) for each in zip(*found, strict=True))
    mean = sum(each[1] for each in found) / world
    over = [f"{sent / size:.2f}" if size else "" for size in least(world, options)]
    share = f"{held / (alone / world):.2f}" if alone else ""
    cells = [f"{sent / 1e6:.2f}", *over, f"{edges / mean:.2f}", f"{held / 1e6:.1f}", share]
    return f"| {world} | {' | '.join(cells)} |", held


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--source-heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--mask", choices=MASKS, default="causal")
    parser.add_argument("--backward", action="store_true")
    options = parser.parse_args()
    print(machine.line())
    print({name: value for name, value in vars(options).items() if name != "ranks"})
    print(HEAD)
    alone = None
    for world in options.ranks:
        text, held = row(world, options, alone)
        alone = held if world == 1 else alone
        print(text, flush=True)


if __name__ == "__main__":
    main()
