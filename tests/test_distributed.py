"""Attention over ranks: equal to one process, no more bytes than the ring, even work, no hang."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

import clearhead as ch
from clearhead import distributed, masks, readings
from clearhead._core import Sizes
from clearhead.distributed.sequence import agreement, ring, walk
from clearhead.distributed.sequence.balance import make_plan
from clearhead.distributed.sequence.plan import Costs, Plan, Shares, SourcePiece
from tests import oracle
from tests.cases import CASES, Case
from tests.ranks import LOST, SHORT, Failure, Ranks

BY_NAME = {case.name: case for case in CASES}
TENSORS = ("query", "key", "value", "bias", "sinks")
SPLIT = ("query", "key", "value")
# Positions, of which most numbers of ranks have uneven shares.
T = 37
SMALL = Case("fewer positions than ranks", query=2, mask=masks.causal, formula=lambda i, j: j <= i)
pytestmark = pytest.mark.slow
GROUPED = Case(
    "grouped over ranks", head=6, source_head=2, query=T, head_dim=8, value_dim=5,
    mask=lambda: masks.causal() & masks.window(11),
    formula=lambda i, j: (j <= i) & (i - j < 11),
)  # fmt: skip
DOCUMENTS = Case(
    "documents over ranks", head=4, source_head=4, query=T, head_dim=8, bias=(4, T, T),
    mask=lambda: masks.causal() & masks.document(torch.arange(T) // 9),
    formula=lambda i, j: (j <= i) & (i // 9 == j // 9),
)  # fmt: skip
# Whole heads can be given to ranks.
MANY = Case(
    "a head for each rank", head=16, source_head=8, query=T, head_dim=8, value_dim=5,
    mask=masks.causal, formula=lambda i, j: j <= i,
)  # fmt: skip
SINKS = Case(
    "sinks over ranks", head=4, source_head=2, query=T, head_dim=8, bias=(1, T, T), sinks=True,
    mask=masks.causal, formula=lambda i, j: j <= i,
)  # fmt: skip
ALL = {case.name: case for case in (*CASES, SMALL, GROUPED, DOCUMENTS, MANY, SINKS)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(tmp_path_factory.mktemp("ranks") / "store")
    yield found
    found.close()


def answers(found: list[Any]) -> list[Any]:
    """The answers of all ranks, none of which is an error."""
    for answer in found:
        assert not isinstance(answer, Failure), answer
    return found


def whole(shares: list[Any], axis: int = -2) -> Any:
    """The shares of all ranks side by side, each tensor of them."""
    return pytree.tree_map(lambda *x: torch.cat([torch.as_tensor(y) for y in x], axis), *shares)


# Run by each rank.


def in_pieces(group: Any, *given: Any) -> Any:
    """`attended`, with sources that are sent in as many pieces as possible."""
    size, walk.PIECE = walk.PIECE, 1
    try:
        return attended(group, *given)
    finally:
        walk.PIECE = size


def attended(group: Any, name: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """This rank's context, log-sum-exp and gradients of a case; those of bias and sinks summed."""
    given = ALL[name].inputs(dtype)
    given |= {n: distributed.shard(given[n], group=group) for n in SPLIT}
    leaves = {n: given[n].clone().requires_grad_() for n in TENSORS if n in given}
    torch.manual_seed(3)
    context, lse = distributed.attend(
        **{**given, **leaves, **options}, read=readings.LogSumExp(), group=group
    )
    (context.double().sin().sum() + lse[lse.isfinite()].double().sum()).backward()
    gradients = [leaves[n].grad for n in leaves]
    for x in gradients[3:]:
        dist.all_reduce(x, group=group)
    lead = [x.detach().float().numpy() for x in (context, lse.unsqueeze(-1), *gradients[:3])]
    return lead, [x.float().numpy() for x in gradients[3:]]


UNEVEN = {3: (0, 30, 7), 8: (0, 5, 0, 0, 21, 1, 10, 0)}


def in_uneven_shares(group: Any, *given: Any) -> Any:
    """`attended`, with shares of very different sizes, some of 0."""

    def uneven(x: Tensor, *, group: Any) -> Tensor:
        rank, sizes = dist.get_rank(group), UNEVEN[dist.get_world_size(group)]
        return x.split(sizes, -2)[rank]

    shard, distributed.shard = distributed.shard, uneven
    try:
        return attended(group, *given)
    finally:
        distributed.shard = shard


READ = (
    readings.Entropy(normalized=True), readings.TopK(3), readings.Mass(masks.first(2)),
    readings.Distance(), readings.MaxScore(), readings.Weights(), readings.Scores(),
    readings.LogSumExp(), readings.Received(), readings.BlockMap(3), readings.Overlap(),
    readings.Rows([0, -1]),
)  # fmt: skip
ROWS = 8  # how many of these have rows


def read(group: Any, name: str) -> Any:
    """This rank's readings of a case, in float64."""
    given = ALL[name].inputs(torch.float64)
    given |= {n: distributed.shard(given[n], group=group) for n in SPLIT}
    plain = distributed.attend(**given, group=group)
    context, values = distributed.attend(**given, read=READ, group=group)
    assert torch.equal(plain, context)
    return pytree.tree_map(
        lambda x: x.numpy(), [tuple(v) if isinstance(v, tuple) else v for v in values]
    )


SUMMED = (
    readings.Entropy(), readings.Entropy(normalized=True), readings.Mass(masks.first(2)),
    readings.Distance(), readings.Weights(), readings.Scores(), readings.LogSumExp(),
    readings.Received(), readings.BlockMap(3), readings.Rows([0, -1]),
)  # fmt: skip
OF_ROWS = 7  # how many of these have rows


def loss_of(context: Tensor, values: Any, alone: bool = True) -> Tensor:
    """A loss of all values; those that are whole on every rank count where `alone` is true."""
    values = values if alone else values[:OF_ROWS]
    tensors = [x for x in pytree.tree_leaves(values) if x.requires_grad]
    finite = [torch.where(x.isfinite(), x, 0) for x in (context, *tensors)]
    return torch.stack([x.sin().sum() * i for i, x in enumerate(finite, 1)]).sum()


def gradients_of_readings(group: Any, name: str, dtype: torch.dtype) -> Any:
    """The gradients of a loss of context and readings; rank 1 has that of the whole values."""
    given = ALL[name].inputs(dtype)
    given |= {n: distributed.shard(given[n], group=group) for n in SPLIT}
    leaves = {n: given[n].clone().requires_grad_() for n in TENSORS if n in given}
    context, values = distributed.attend(**{**given, **leaves}, read=SUMMED, group=group)
    world = dist.get_world_size(group)
    loss_of(context, values, dist.get_rank(group) == 1 % world).backward()
    found = [leaves[n].grad for n in leaves]
    for x in found[3:]:
        dist.all_reduce(x, group=group)
    return [x.numpy() for x in found]


def sharded(group: Any) -> Any:
    """Context, log-sum-exp and received weight of DTensors, whole, and the gradients."""
    mesh = DeviceMesh.from_group(group, "cpu")
    given = ALL[MANY.name].inputs(torch.float64)
    tensors = {n: local_dtensor(given[n], mesh).requires_grad_() for n in SPLIT}
    read = (readings.LogSumExp(), readings.TopK(2), readings.Received())
    with torch.no_grad():
        context, (lse, top, received) = distributed.attend(**{**given, **tensors}, read=read)
    assert [x.placements[0] for x in (context, lse, top.sources, received)] == [
        Shard(2), Shard(2), Shard(2), Replicate(),
    ]  # fmt: skip
    whole = [x.full_tensor().numpy() for x in (context, lse, top.sources, received)]
    context, received = distributed.attend(**{**given, **tensors}, read=readings.Received())
    (context.sin().sum() + received.sin().sum()).backward()
    return whole, [x.grad.full_tensor().numpy() for x in tensors.values()]


def local_dtensor(x: Tensor, mesh: Any) -> Any:
    """A tensor sharded over the positions, as torch.chunk cuts it, without communication."""
    parts = x.chunk(mesh.size(), -2)
    rank = mesh.get_local_rank()
    own = parts[rank] if rank < len(parts) else x[..., :0, :]
    placement = [Shard(x.ndim - 2)]
    return DTensor.from_local(own, mesh, placement, shape=x.shape, stride=x.stride())


def refused_dtensors(group: Any) -> list[str]:
    """The errors for other placements."""
    mesh, found = DeviceMesh.from_group(group, "cpu"), []
    x = torch.zeros(2, 4, 6, 8)
    right = local_dtensor(torch.zeros(2, 4, 12, 8), mesh)
    whole = DTensor.from_local(x, mesh, [Replicate()])
    heads = DTensor.from_local(x, mesh, [Shard(1)])
    for q, k, more in (
        (whole, whole, None), (heads, heads, None), (right, whole, None), (right, x, None),
        (right, right, dist.group.WORLD),
    ):  # fmt: skip
        try:
            distributed.attend(q, k, k, group=more)
        except (ValueError, TypeError) as error:
            found.append(str(error))
    return found


def on_two_axes(group: Any) -> tuple[str, float]:
    """The error for DTensors on a mesh of two axes, and how far those on one of them are off."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "cp"))
    x = torch.randn(2, 4, 12, 8, generator=torch.Generator().manual_seed(3)).double()
    both = DTensor.from_local(x[:1, :, :6], mesh, [Shard(0), Shard(2)])
    try:
        distributed.attend(both, both, both)
        said = "no error"
    except ValueError as error:
        said = str(error)
    q = local_dtensor(x, mesh["cp"])
    found = distributed.attend(q, q, q, masks.causal()).full_tensor()
    right = ch.attend(x, x, x, masks.causal(), impl="reference")
    return said, oracle.error(found, right)


def too_large(group: Any) -> tuple[str, int]:
    """The error for maps that do not fit, and by how many bytes the process grows."""
    before = status("VmRSS")
    q = torch.zeros(1, 64, 1 << 14, 1)
    reset_peak()
    try:
        distributed.attend(q, q, q, read=(readings.Scores(), readings.Entropy()), group=group)
    except ValueError as error:
        return str(error), status("VmHWM") - before
    return "no error", 0


def events(group: Any, heads: int) -> list[tuple[str, int]]:
    """What a call does, in order: what it begins to send or receive, and computes, by the step."""
    found, rank, world = [], dist.get_rank(group), dist.get_world_size(group)
    send, receive, compute = dist.isend, dist.irecv, ring.attend_part

    def noting(kind: str, function: Any) -> Any:
        def noted(x: Tensor, *args: Any, **options: Any) -> Any:
            number, what = divmod(options["tag"] // walk.TENSORS, walk.KINDS)
            if what == walk.SOURCE and number:
                found.append((kind, number // walk.MOST if heads > 1 else number))
            return function(x, *args, **options)

        return noted

    def computing(problem: Any) -> Any:
        source = problem.corner.source // 6
        found.append(("compute", (rank - source) % world))
        return compute(problem)

    size, walk.PIECE = walk.PIECE, 1 if heads > 1 else 1 << 20
    dist.isend, dist.irecv = noting("send", send), noting("receive", receive)
    ring.attend_part = computing
    try:
        q = torch.randn(1, heads, 6, 4)
        distributed.attend(q, q, q, group=group)
    finally:
        dist.isend, dist.irecv, ring.attend_part = send, receive, compute
        walk.PIECE = size
    return found


def status(name: str) -> int:
    """A number of bytes in the status of this process."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def counted(group: Any, shape: tuple[int, ...], source_heads: int, backward: bool) -> Any:
    """The bytes that this rank sends for keys, values, queries and context, and its edges."""
    *lead, heads, positions, width = shape
    size = distributed.shard(torch.zeros(positions, 1), group=group).shape[0]
    q = torch.randn(*lead, heads, size, width, requires_grad=backward)
    k, v = (torch.randn(*lead, source_heads, size, width, requires_grad=backward) for _ in "kv")
    sent, edges, send, compute = [0], [0], dist.isend, ring.attend_part

    def sending(x: Tensor, *args: Any, **options: Any) -> Any:
        sent[0] += x.nbytes
        return send(x, *args, **options)

    def computing(problem: Any) -> Any:
        sizes = problem.sizes
        count = (
            problem.mask.count(*sizes[2:])
            if problem.mask is not None
            else sizes.query * sizes.source
        )
        edges[0] += count * sizes.head
        return compute(problem)

    dist.isend, ring.attend_part = sending, computing
    try:
        context = distributed.attend(q, k, v, masks.causal(), group=group)
        if backward:
            context.sum().backward()
    finally:
        dist.isend, ring.attend_part = send, compute
    return sent[0], edges[0], size


def peak(group: Any, positions: int) -> int:
    """How many bytes a rank's memory grows by at most, from before its tensors are made."""

    share = distributed.shard(torch.empty(positions, 0), group=group).shape[0]
    before = status("VmRSS")
    reset_peak()
    q, k, v = (torch.ones(8, share, 64) for _ in "qkv")
    distributed.attend(q, k, v, masks.window(64), group=group)
    return status("VmHWM") - before


def differing(group: Any, what: str) -> None:
    """A call in which the last rank differs from the others."""
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    heads, dtype, mask = 4, torch.float32, masks.causal()
    if last:
        heads = 2 if what == "heads" else heads
        dtype = torch.float64 if what == "dtype" else dtype
        mask = masks.window(3) if what == "mask" else mask
        mask = masks.causal().dense(9, 9) if what == "bool" else mask
    if what == "ids":
        mask = masks.document(torch.arange(12) // (3 if last else 4))
    if what == "version":
        agreement.SCHEMA = 2 if last else 1
    size = (3, 5) if what == "shape" and last else (3, 8)
    q = torch.zeros(heads, *size, dtype=dtype)
    if what == "kind" and last:
        q = q.int()
    q.requires_grad_(what == "gradient" and last)
    options: dict[str, Any] = {"scale": 2.0 if what == "scale" and last else None}
    options["read"] = readings.Entropy() if what == "read" and last else None
    options["bias"] = torch.full((9, 9), float(last)) if what == "bias" else None
    try:
        if what == "call" and last:
            distributed.unshard(q.detach(), group=group)
        if what == "DTensors" and not last:
            # With the group of the test, as the last rank has no mesh.
            q = DTensor.from_local(q, DeviceMesh.from_group(group, "cpu"), [Shard(1)])
            distributed.attend(q, q, q, mask)
        distributed.attend(q, q, q, mask, **options, group=group)
    finally:
        agreement.SCHEMA = 1


def refused(group: Any) -> list[str]:
    """The errors of calls that are not served over ranks."""

    class Named(Tensor):
        pass

    q, found = torch.zeros(2, 3, 4, requires_grad=True), []
    calls: list[dict[str, Any]] = [
        {"query": q.detach().as_subclass(Named)},
        {"query": q, "read": readings.TopK(1)},
        {"query": q, "read": (readings.Entropy(), readings.MaxScore())},
        {"query": q, "read": readings.Overlap()},
        {"query": q.detach().bfloat16(), "autocast": True},
    ]
    for call in calls:
        x, cast = call.pop("query"), call.pop("autocast", False)
        try:
            with torch.autocast("cpu", enabled=cast):
                distributed.attend(x, x, x, group=group, **call)
        except (ValueError, TypeError) as error:
            found.append(str(error))
    return found


def losing(group: Any, what: str, lost: int) -> tuple[str, float]:
    """The error of a rank, and how long it took, where one rank of the group is lost."""
    mine = dist.get_rank() == lost
    name = "part_gradient" if what == "backward" else "attend_part"
    compute, calls = getattr(ring, name), [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        if mine and calls[0] == 2:
            if what == "killed":
                os._exit(1)
            if what == "raises":
                raise KeyboardInterrupt
            time.sleep(SHORT + 2)
        return compute(*given)

    if mine and what == "late":
        time.sleep(SHORT + 2)
    setattr(ring, name, failing)
    started = time.monotonic()
    try:
        q = torch.randn(2, 8, 4, requires_grad=what == "backward")
        # A rank that has all it needs is done; it meets the lost rank in its next call.
        for _ in range(2):
            context = distributed.attend(q, q, q, group=group)
            if what == "backward":
                context.sum().backward()
        return "no error", 0.0
    except (RuntimeError, KeyboardInterrupt) as error:
        return str(error), time.monotonic() - started
    finally:
        setattr(ring, name, compute)


# The tests.


def right(case: Case, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Context, log-sum-exp and gradients of one process."""
    given = case.inputs(dtype)
    leaves = {n: given[n].clone().requires_grad_() for n in TENSORS if n in given}
    torch.manual_seed(3)
    context, lse = ch.attend(**{**given, **leaves, **options}, read=readings.LogSumExp())
    (context.double().sin().sum() + lse[lse.isfinite()].double().sum()).backward()
    gradients = [leaves[n].grad for n in leaves]
    return [x.detach() for x in (context, lse.unsqueeze(-1), *gradients)]


def wide(case: Case, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """The same in float64, from inputs rounded to the dtype."""

    class Rounded:
        def inputs(self, _: torch.dtype) -> dict[str, Any]:
            given = case.inputs(dtype)
            return {n: x.double() if n in TENSORS else x for n, x in given.items()}

    return right(Rounded(), torch.float64, options)  # type: ignore[arg-type]


def check_equal(
    ranks: Ranks, world: int, case: Case, dtype: torch.dtype, run: Any = None, **options: Any
) -> None:
    """Context, log-sum-exp and gradients are those of one process, to the oracle's bounds."""
    found = answers(ranks.run(run or attended, world, case.name, dtype, options))
    shares = whole([answer[0] for answer in found])
    ours = [*shares, *map(torch.as_tensor, found[0][1])]
    # Each part that is merged is rounded once more.
    parts = world * (walk.MOST if run is in_pieces else 1)
    more = (parts - 1) * torch.finfo(dtype).eps
    exact, same = wide(case, dtype, options), right(case, dtype, options)
    if not options:
        context = case.right(case.inputs(dtype)).context
        assert oracle.error(exact[0], context) < 1e-10
    names = ("context", "lse", *(n for n in TENSORS if n in case.inputs()))
    for name, x, plain, true in zip(names, ours, same, exact, strict=True):
        budget = oracle.budget(plain, true, torch.float32 if name == "lse" else dtype)
        largest = torch.where(true.isfinite(), true, 0).abs().flatten().tolist()
        assert oracle.error(x, true) <= budget + more * max([1.0, *largest]), (
            case.name,
            world,
            dtype,
            name,
        )


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_it_equals_one_process(ranks: Ranks, world: int) -> None:
    for case in ALL.values():
        check_equal(ranks, world, case, torch.float32)


@pytest.mark.parametrize("world", [3, 8])
def test_it_equals_one_process_in_bf16(ranks: Ranks, world: int) -> None:
    for case in (SMALL, GROUPED, DOCUMENTS):
        check_equal(ranks, world, case, torch.bfloat16)


@pytest.mark.parametrize("world", [1, 3, 8])
def test_it_equals_one_process_in_pieces(ranks: Ranks, world: int) -> None:
    for case in (GROUPED, DOCUMENTS, MANY, SINKS):
        check_equal(ranks, world, case, torch.float32, run=in_pieces)


@pytest.mark.parametrize("world", [3, 8])
def test_it_equals_one_process_in_uneven_shares(ranks: Ranks, world: int) -> None:
    for case in (GROUPED, DOCUMENTS, SINKS):
        for dtype in (torch.float32, torch.float16):
            check_equal(ranks, world, case, dtype, run=in_uneven_shares)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_dropout_drops_the_same_weights(ranks: Ranks, world: int) -> None:
    for case in (GROUPED, DOCUMENTS):
        check_equal(ranks, world, case, torch.float32, dropout=0.3)


@pytest.mark.parametrize("world", [1, 3, 8])
def test_readings_equal_those_of_one_process(ranks: Ranks, world: int) -> None:
    for case in (SMALL, GROUPED, DOCUMENTS):
        found = answers(ranks.run(read, world, case.name))
        _, values = ch.attend(**case.inputs(torch.float64), read=READ, impl="reference")
        for i, (reading, value) in enumerate(zip(READ, values, strict=True)):
            axis = -1 if torch.is_tensor(value) and value.ndim == 3 else -2
            for leaf, expected in enumerate(pytree.tree_leaves(value)):
                parts = [torch.as_tensor(pytree.tree_leaves(answer[i])[leaf]) for answer in found]
                if i < ROWS:
                    parts = [torch.cat(parts, axis)]
                for part in parts:
                    assert oracle.error(part, expected) < 1e-12, (case.name, reading)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("case", [SMALL, GROUPED, DOCUMENTS, SINKS], ids=lambda case: case.name)
def test_gradients_of_readings_equal_those_of_one_process(
    ranks: Ranks, world: int, case: Case
) -> None:
    found = answers(ranks.run(gradients_of_readings, world, case.name, torch.float64))
    given = case.inputs(torch.float64)
    leaves = {n: given[n].clone().requires_grad_() for n in TENSORS if n in given}
    loss_of(*ch.attend(**{**given, **leaves}, read=SUMMED, impl="reference")).backward()
    ours = [whole([answer[i] for answer in found]) for i in range(3)]
    ours += [torch.as_tensor(x) for x in found[0][3:]]
    for (name, leaf), x in zip(leaves.items(), ours, strict=True):
        assert oracle.error(x, leaf.grad) < 1e-11, name


@pytest.mark.parametrize("world", [1, 3, 8])
def test_dtensors_in_and_out(ranks: Ranks, world: int) -> None:
    given = MANY.inputs(torch.float64)
    leaves = {n: given[n].clone().requires_grad_() for n in SPLIT}
    read = (readings.LogSumExp(), readings.TopK(2), readings.Received())
    context, (lse, top, received) = ch.attend(**{**given, **leaves}, read=read, impl="reference")
    (context.sin().sum() + received.sin().sum()).backward()
    for values, gradients in answers(ranks.run(sharded, world)):
        for x, right in zip(values, (context, lse, top.sources, received), strict=True):
            assert oracle.error(torch.as_tensor(x), right.detach()) < 1e-12
        for x, leaf in zip(gradients, leaves.values(), strict=True):
            assert oracle.error(torch.as_tensor(x), leaf.grad) < 1e-12


def test_other_placements_are_refused_by_name(ranks: Ranks) -> None:
    for texts in answers(ranks.run(refused_dtensors, 2)):
        replicated, heads, key, mixed, group = texts
        rule = "is sharded over the positions, Shard(2); got"
        assert replicated.startswith(f"query: {rule} R")
        assert heads.startswith(f"query: {rule} S(1)")
        assert key.startswith(f"key: {rule} R")
        assert mixed.startswith("query, key, value: are all DTensors, or none is; got DTensor, T")
        assert group.startswith("group: is the group of the device mesh")


def test_a_mesh_of_two_axes_is_refused_and_one_axis_of_it_is_not(ranks: Ranks) -> None:
    for said, error in answers(ranks.run(on_two_axes, 4)):
        assert said.startswith("query: is on a device mesh of one axis; got DeviceMesh(")
        assert "mesh['cp']" in said
        assert error < 1e-12


def test_maps_that_do_not_fit_are_refused_before_they_are_allocated(ranks: Ranks) -> None:
    for text, grown in answers(ranks.run(too_large, 8)):
        size = 64 * (1 << 14) * (8 << 14) * 4
        assert text.startswith("read: is small enough for the value of Scores() to fit in memory")
        assert f"got {size:,} bytes, with " in text
        assert "free for 8 ranks on the machine of rank 0" in text
        assert "Entropy()" in text
        assert grown < 1 << 27


@pytest.mark.parametrize("heads", [1, 16])
def test_what_comes_next_travels_while_a_step_is_computed(ranks: Ranks, heads: int) -> None:
    # Many heads travel in pieces: then the first piece of the next step does.
    for found in answers(ranks.run(events, 4, heads)):
        for step in range(1, 3):
            computed = max(i for i, event in enumerate(found) if event == ("compute", step))
            assert found.index(("receive", step + 1)) < computed
            assert found.index(("send", step + 1)) < computed
        steps = [step for kind, step in found if kind == "compute"]
        assert steps == sorted(steps)
        assert set(steps) == {0, 1, 2, 3}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_bytes_and_work_of_a_rank(ranks: Ranks, world: int, group: int, backward: bool) -> None:
    # The ring sends a share of keys and values to each of the other ranks; a backward pass sends
    # them again, and their gradients, which come home by one more step.
    heads = 4 if group == 1 else 2
    shape = (1, heads * group, 8 * 128, 64)
    found = answers(ranks.run(counted, world, shape, heads, backward))
    share = 2 * heads * (shape[-2] // world) * shape[-1] * 4
    least = share * ((world - 1) * (3 if backward else 1) + backward)
    # With few ranks, what evens out the work of grouped heads takes more: the last rank has 1.5 (or
    # 2.5 of three ranks) times the mean, and the rows that it gives away travel beside the sources.
    if group > 1 and world < (3 if backward else 4):
        given = {2: 1 / 4, 3: 1 / 3}[world]
        least += given * group * share / 2
    arguments = 4096 * (world - 1)  # the exchange of arguments, whose size is that of no tensor
    edges = [answer[1] for answer in found]
    for sent, count, _ in found:
        assert sent <= 1.05 * least + arguments
        assert count <= 1.1 * sum(edges) / world
    assert sum(edges) == heads * group * 1024 * 1025 // 2


@pytest.mark.parametrize("world", [2, 4, 8, 64])
@pytest.mark.parametrize("source_heads", [1, 2, 3, 8])
def test_causal_work_is_even_for_any_number_of_heads(world: int, source_heads: int) -> None:
    share = (64,) * world
    shares = Shares(Sizes(1, 24, 64 * world, 64 * world), source_heads, share, share)
    plan = make_plan(masks.causal(), shares, Costs(24 / source_heads, 24 / source_heads, 2))
    work = [0] * world
    for (rank, source), heads in plan.needed.items():
        piece = SourcePiece(heads, slice(0, 64))
        work[rank] += sum(_edges(plan, task) for _, task in plan.tasks(rank, source, piece))
    assert sum(work) == source_heads * (64 * world) * (64 * world + 1) // 2
    assert max(work) <= 1.1 * sum(work) / world


def _edges(plan: Plan, task: Any) -> int:
    mask = plan.shares.mask(masks.causal(), task)
    rows, heads = task.rows.stop - task.rows.start, task.heads.stop - task.heads.start
    sources = plan.shares.sources[task.source]
    return heads * (rows * sources if mask is None else mask.count(rows, sources))


def test_memory_falls_with_the_number_of_ranks(ranks: Ranks) -> None:
    positions = 1 << 15
    alone, eight = (max(answers(ranks.run(peak, world, positions))) for world in (1, 8))
    # Inputs, context in both precisions and their sum take the share; the rest is noise of the
    # allocator and of the process.
    assert alone > 8 * positions * 64 * 4 * 4
    assert eight < alone / 8 * 1.6


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("heads", "query: is the same on all ranks of distributed.attend"),
        ("dtype", r"float32 on rank 0, .* float64 on rank 2"),
        ("mask", r"mask: is the same on all ranks .*causal\(.* on rank 0, window"),
        ("ids", "mask: is the same on all ranks"),
        ("bool", r"mask: is the same .*causal\(.* on rank 0, \(positions, 9\) bool"),
        ("read", r"read: is the same .* got \(\) on rank 0, \(Entropy"),
        ("bias", "bias: is the same on all ranks"),
        ("gradient", "float32 on rank 0, .* float32 with a gradient on rank 2"),
        ("DTensors", "is the same .* got DTensors, 9 queries on rank 0, plain tensors on rank 2"),
        ("scale", "scale: is the same on all ranks"),
        ("shape", "query: is the same on all ranks"),
        ("version", "messages of version 1 on rank 0, .* messages of version 2 on rank 2"),
    ],
)
def test_ranks_that_differ_raise_on_all_ranks(ranks: Ranks, what: str, text: str) -> None:
    for failure in ranks.run(differing, 3, what):
        assert isinstance(failure, Failure)
        assert failure.text.startswith("ValueError")
        assert re.search(text, failure.text, re.DOTALL), failure.text


def test_a_refusal_of_one_rank_raises_on_all_ranks(ranks: Ranks) -> None:
    *others, last = ranks.run(differing, 3, "kind")
    assert last.text.startswith("TypeError: query, key, value: are tensors of")
    for failure in others:
        assert failure.text.startswith("RuntimeError: rank 2 refuses its arguments")


def test_ranks_that_make_other_calls_raise_on_all_ranks(ranks: Ranks) -> None:
    *others, last = ranks.run(differing, 3, "call")
    there, here = (
        f"the exchange of arguments of distributed.{name}" for name in ("unshard", "attend")
    )
    for rank, failure in enumerate(others):
        said = f"RuntimeError: rank 2 is in {there}, and rank {rank} in {here}"
        assert failure.text.startswith(said)
    assert last.text.startswith(f"RuntimeError: rank 0 is in {here}, and rank 2 in {there}")


def test_what_is_not_served_is_refused(ranks: Ranks) -> None:
    for kind, *gradients, cast in answers(ranks.run(refused, 2)):
        assert kind.startswith("query, key, value: are plain tensors or DTensors; got Named")
        for name, text in zip(("TopK", "MaxScore", "Overlap"), gradients, strict=True):
            assert text.startswith(f"read: has no gradient of {name} over ranks; got {name}(")
        assert cast.startswith("query: is not converted by torch.autocast here")


@pytest.mark.parametrize(
    ("what", "lost"), [("late", 2), ("stalls", 3), ("backward", 1), ("raises", 0), ("killed", 7)]
)
def test_a_lost_rank_is_named_on_all_others_in_time(ranks: Ranks, what: str, lost: int) -> None:
    found = ranks.run(losing, what, what, lost, silent=what == "killed")
    for rank, answer in zip(LOST[what], found, strict=False):
        if rank != lost:
            message, seconds = answer
            step = r"(step \d of 3|the exchange of arguments)"
            assert re.match(f"rank {lost} did not answer in {step} of dist", message), message
            assert seconds < SHORT + 1


def test_without_a_group() -> None:
    q = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match=r"needs an initialized torch\.distributed") as error:
        distributed.attend(q, q, q)
    assert "torchrun" in str(error.value)
