"""watch, knockout, monitor and gather in models split over ranks, beside the whole model."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import _pytree as pytree

import clearhead as ch
from clearhead import distributed, masks, readings
from clearhead.recording import store
from tests.ranks import Failure, Ranks

pytestmark = pytest.mark.slow
READ = (readings.Weights(), readings.TopK(3), readings.Entropy(), readings.Received())
WIDTH, HEADS, POSITIONS = 32, 4, 6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(tmp_path_factory.mktemp("ranks") / "group", world=4)
    yield pool
    pool.close()


def answers(found: list[Any]) -> list[Any]:
    for answer in found:
        assert not isinstance(answer, Failure), answer
    return found


class Attention(nn.Module):
    """Causal attention of grouped heads; its number of heads follows from its projections."""

    def __init__(self, fused: bool, shared: int) -> None:
        super().__init__()
        self.each, self.fused, self.causal = WIDTH // HEADS, fused, True
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, shared * self.each) for _ in "kv")
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.each)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            scores = q @ k.mT / self.each**0.5
            if self.causal:
                closed = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
                scores = scores.masked_fill(closed, -torch.inf)
            mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, fused: bool = True, shared: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(fused, shared) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def inputs(batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randn(batch, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(seed))


def split(model: Model, mesh: DeviceMesh) -> None:
    """Split the heads of a model over the ranks of a mesh."""
    columns = {name: ColwiseParallel() for name in ("query", "key", "value")}
    for layer in model.layers:
        parallelize_module(layer, mesh, {**columns, "out": RowwiseParallel()})


def tensor_parallel(group: Any, *given: Any) -> Model:
    """The model with its heads split over the ranks of a group."""
    split(model := Model(*given), DeviceMesh.from_group(group, "cpu"))
    return model


def plain(seen: Any) -> Any:
    """The records of a rank in terms that other processes can compare."""
    if seen is None:
        return None
    records = [
        (x.layer, x.module, x.heads, tuple(x.sizes), x.source_heads, x.groups, x.shares,
         repr(x.mask), x.queries, pytree.tree_map(lambda y: y.numpy(), list(x.value)))
        for x in seen
    ]  # fmt: skip
    return records, list(seen.notes)


def close(found: Any, right: Any) -> None:
    """Equal to rounding: the projections of a share sum in another order."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(right), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(
            torch.as_tensor(one), torch.as_tensor(other), rtol=1e-5, atol=1e-6
        )


def watched(group: Any, fused: bool, shared: int, **chosen: Any) -> Any:
    model = tensor_parallel(group, fused, shared)
    with torch.no_grad(), ch.watch(model, read=READ, **chosen) as seen:
        model(inputs())
    return plain(seen), plain(distributed.gather(seen, group))


@pytest.mark.parametrize("shared", [4, 2])
@pytest.mark.parametrize("fused", [True, False])
def test_tensor_parallel_records_have_the_numbers_of_their_heads(
    ranks: Ranks, fused: bool, shared: int
) -> None:
    model = Model(fused, shared)
    with torch.no_grad(), ch.watch(model, read=READ) as seen:
        model(inputs())
    right, _ = plain(seen)
    for rank, ((records, notes), whole) in enumerate(answers(ranks.run(watched, 2, fused, shared))):
        here = slice(None), slice(2 * rank, 2 * rank + 2)
        for record, other in zip(records, right, strict=True):
            assert record[2] == (2 * rank, 2 * rank + 1)
            assert record[3] == other[3]
            assert record[6] == (("head", 2 * rank, 2, 4),)
            close(record[9], pytree.tree_map(operator.itemgetter(here), other[9]))
            assert record[4:6] == (other[4:6] if fused else record[4:6])
        assert notes == [
            f"tensor parallel: heads {2 * rank} to {2 * rank + 1} of 4 are on this rank; "
            "clearhead.distributed.gather(seen) joins those of all ranks"
        ]
        assert (whole is None) == (rank > 0)
        for record, other in zip(whole[0] if whole else [], right if whole else [], strict=True):
            assert record[:4] == other[:4]
            assert record[6:9] == other[6:9]
            close(record[9], other[9])


def cut(group: Any) -> Any:
    """Outputs under cuts of heads of either rank, and how far each head moved."""
    model, found = tensor_parallel(group), []
    for heads in ([(0, 1)], [(0, 3), (1, 0)], None):
        with torch.no_grad(), ch.knockout(model, masks.diagonal(1), heads=heads) as cut:
            out = model(inputs())
        found.append((out.numpy(), dict(cut.moved)))
    return found


def test_tensor_parallel_heads_are_cut_by_their_numbers(ranks: Ranks) -> None:
    model, right = Model(), []
    for heads in ([(0, 1)], [(0, 3), (1, 0)], None):
        with torch.no_grad(), ch.knockout(model, masks.diagonal(1), heads=heads) as cut_here:
            out = model(inputs())
        right.append((out, dict(cut_here.moved)))
    found = answers(ranks.run(cut, 2))
    for at, (out, moved) in enumerate(right):
        assert [set(each[at][1]) for each in found] == [
            {pair for pair in moved if pair[1] // 2 == rank} for rank in (0, 1)
        ]
        for each in found:
            close(each[at][0], out)


def refused(group: Any) -> list[str]:
    """What this rank hears of records that do not fit together."""
    rank, said = torch.distributed.get_rank(group), []
    whole, split = Model(), tensor_parallel(group)

    def seen(model: Any, read: Any, batch: int = 2, **chosen: Any) -> Any:
        with torch.no_grad(), ch.watch(model, read=read, **chosen) as found:
            model(inputs(batch))
        return found

    def tried(*given: Any, **options: Any) -> None:
        try:
            distributed.gather(*given, group=group, **options)
            said.append("nothing")
        except (ValueError, TypeError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")

    tried(seen(split, readings.Overlap()))
    tried(seen(whole, readings.Entropy()))
    tried(seen(whole, readings.Entropy()), along="batch" if rank else "head")
    tried(seen(whole, readings.Entropy() if rank else readings.LogSumExp()), along="batch")
    tried(seen(whole, readings.Entropy(), layers=[rank]), along="batch")
    tried(seen(whole, readings.BlockMap(2)), along="position")
    tried("records" if rank else seen(whole, readings.Entropy()), along="batch")
    other = seen(whole, readings.Entropy())
    version, store.VERSION = store.VERSION, store.VERSION + rank
    tried(other, along="batch")
    store.VERSION = version
    return said


def test_shares_that_do_not_fit_are_refused_on_all_ranks(ranks: Ranks) -> None:
    first, second = answers(ranks.run(refused, 2))
    words = [
        "read: has no pair of heads that lie on two ranks",
        "along: is needed: the ranks do not say of what they hold shares",
        "along: is the same on all ranks of distributed.gather; got 'head' on rank 0, 'batch' on",
        "seen: has records of equal read on all ranks; got layer 0: LogSumExp() on one rank",
        "seen: has the same calls on all ranks; got no layer 0 on rank 1",
        "read: cannot be joined along the positions; got BlockMap(cells=2)",
        "rank 1 refuses its arguments of distributed.gather: seen: is what watch saw; got str",
        "schema of the records: is the same on all ranks of distributed.gather; got "
        "clearhead.seen, version 1 on rank 0, clearhead.seen, version 2 on rank 1",
    ]
    for one, other, text in zip(first, second, words, strict=True):
        assert text in one
        assert one == other or "seen: is what watch saw" in other


def batches(group: Any, how: str) -> Any:
    """The joined records of ranks with two samples and one, of which the model masks some."""
    rank = torch.distributed.get_rank(group)
    model: Any = Model()
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
    elif how == "fsdp":
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    mine = inputs(3)[:2] if rank == 0 else inputs(3)[2:]
    with torch.no_grad(), ch.watch(model, read=READ) as seen:
        model(mine)
    return plain(distributed.gather(seen, group, to=1, along="batch" if how == "alone" else None))


@pytest.mark.parametrize("how", ["ddp", "fsdp", "alone"])
def test_samples_of_ranks_are_joined(ranks: Ranks, how: str) -> None:
    with torch.no_grad(), ch.watch(model := Model(), read=READ) as seen:
        model(inputs(3))
    none, (records, notes) = answers(ranks.run(batches, 2, how))
    assert none is None
    assert notes == []
    for record, right in zip(records, plain(seen)[0], strict=True):
        assert record[2:9] == right[2:9]
        close(record[9], right[9])


def monitored(group: Any, how: str) -> Any:
    """What this rank's monitor knows after two steps of training."""
    size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    model: Any = Model()
    mine = inputs(4)
    if how == "both":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("samples", "heads"))
        split(model, mesh["heads"])
        mine, mesh = mine.chunk(2)[rank // 2], mesh["samples"]
    elif how == "heads":
        split(model, mesh)
    if how != "heads":
        mine = mine if how == "both" else mine.chunk(size)[rank]
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls, real = list[int](), torch.distributed.all_reduce
    with ch.monitor(model, alarms=False) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            torch.distributed.all_reduce = lambda *given: calls.append(1) or real(*given)
            loss = model(mine).square().mean()
            torch.distributed.all_reduce = real
            loss.backward()
            optimizer.step()
    return [x.numpy() for _, x in monitor.history], monitor.layers, monitor.notes, calls


@pytest.mark.parametrize("how", ["heads", "samples", "both"])
def test_the_monitor_knows_all_heads_and_samples(ranks: Ranks, how: str) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ch.monitor(model, alarms=False) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs(4)).square().mean().backward()
            optimizer.step()
    right = [x for _, x in monitor.history]
    for history, layers, notes, calls in answers(ranks.run(monitored, 4, how)):
        assert notes == []
        assert layers == monitor.layers
        assert len(calls) == 2  # one a step
        close(history, right)


def stages(group: Any) -> str:
    """What a rank hears whose model has other layers than that of rank 0."""
    model = Model()
    if torch.distributed.get_rank(group) == 3:
        model.layers = model.layers[:1]
    try:
        with ch.monitor(model, alarms=False):
            model(inputs())
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_monitor_of_other_layers_raises_on_all_ranks(ranks: Ranks) -> None:
    for said in answers(ranks.run(stages, 4)):
        assert "rank 0 reads 2 layers of up to 4 heads, rank 3 1 layers of up to 4" in said


def by_hand(group: Any) -> Any:
    """The joined records of a model that splits its heads without telling torch: plain weights."""
    rank, model, whole = torch.distributed.get_rank(group), Model(), Model()
    for layer in model.layers:
        for name in ("query", "key", "value"):
            linear = getattr(layer, name)
            shares = (x.detach().chunk(2)[rank] for x in (linear.weight, linear.bias))
            linear.weight, linear.bias = map(nn.Parameter, shares)
        layer.out = nn.Identity()
    with torch.no_grad(), ch.watch(model.layers[0], read=READ) as seen:
        model.layers[0](inputs())
    with torch.no_grad(), ch.watch(whole.layers[0], read=READ) as right:
        whole.layers[0](inputs())
    return plain(distributed.gather(seen, group, along="head")), plain(right)


def test_heads_that_are_split_by_hand_are_joined_in_the_order_of_the_ranks(ranks: Ranks) -> None:
    (found, right), (none, _) = answers(ranks.run(by_hand, 2))
    assert none is None
    assert found[0][0][2:9] == right[0][0][2:9]
    close(found[0][0][9], right[0][0][9])


def on_dtensors(group: Any) -> str:
    """What watch says of attention on DTensors."""
    model, mesh = Model(fused=False), DeviceMesh.from_group(group, "cpu")
    columns = dict.fromkeys(("query", "key", "value"), ColwiseParallel(use_local_output=False))
    for layer in model.layers:
        assert isinstance(layer, Attention)
        layer.causal = False
        parallelize_module(layer, mesh, {**columns, "out": RowwiseParallel()})
    try:
        with torch.no_grad(), ch.watch(model):
            model(inputs())
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_attention_on_dtensors_is_named(ranks: Ranks) -> None:
    for said in answers(ranks.run(on_dtensors, 2)):
        assert "layers.0: not seen, its tensors are DTensors" in said


def in_transformers(group: Any, path: str) -> Any:
    """A Llama under its own plan of tensor parallelism, and whole; forward and generate."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank(group))
    found, tokens = [], torch.arange(12).reshape(2, 6)
    for options in ({}, {"distributed_config": DistributedConfig(tp_size=4)}):
        model: Any = AutoModelForCausalLM.from_pretrained(path, **options).eval()
        with torch.no_grad(), ch.watch(model, read=READ) as seen:
            model(tokens)
            model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
        found.append(distributed.gather(seen, group) if options else seen)
    return [plain(x) for x in found]


def test_the_plan_of_transformers(ranks: Ranks, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    (right, found), *others = answers(ranks.run(in_transformers, 4, str(tmp_path)))
    assert [x for _, x in others] == [None] * 3
    assert found[1] == right[1]
    for record, whole in zip(found[0], right[0], strict=True):
        assert record[:9] == whole[:9]
        assert record[4] == 4
        close(record[9], whole[9])


class Split(Model):
    """The model on this rank's positions, which attends over those of all."""

    def __init__(self, group: Any, mask: Any, shared: int) -> None:
        super().__init__(shared=shared)
        for layer in self.layers:
            layer.group, layer.mask = group, mask  # type: ignore[assignment]
            layer.forward = functools.partial(attending, layer)  # type: ignore[method-assign]


def attending(self: Any, x: Tensor) -> Tensor:
    """The forward of a layer whose group is None: in one process."""
    q, k, v = (
        layer(x).unflatten(-1, (-1, self.each)).transpose(1, 2)
        for layer in (self.query, self.key, self.value)
    )
    one = (
        ch.attend if self.group is None else functools.partial(distributed.attend, group=self.group)
    )
    return self.out(one(q, k, v, self.mask).transpose(1, 2).flatten(2))


SPLIT = (
    *READ,
    readings.Mass(masks.diagonal(1)),
    readings.Distance(),
    readings.BlockMap(2),
    readings.Rows([2]),
)
MASKS = {"causal": masks.causal(), "padded": masks.causal() & masks.lengths([6, 4]), "none": None}


def on_positions(group: Any, mask: str, shared: int) -> Any:
    """What a rank sees of its positions, what is gathered, and what its monitor knows."""
    model = Split(group, MASKS[mask], shared)
    mine = distributed.shard(inputs(), group=group)
    with torch.no_grad(), ch.watch(model, read=SPLIT) as seen:
        model(mine)
    with torch.no_grad(), ch.watch(model, read=readings.Entropy(), heads=[1, 3]) as some:
        model(mine)
    found = [plain(seen), plain(distributed.gather(seen, group)), plain_values(some)]
    found.append([x.check for x in seen])
    return found


def plain_values(seen: Any) -> Any:
    return [x.value.numpy() for x in seen]


@pytest.mark.parametrize(
    ("mask", "shared"), [("causal", 4), ("causal", 2), ("padded", 4), ("none", 4)]
)
def test_a_rank_sees_its_positions_under_their_numbers(
    ranks: Ranks, mask: str, shared: int
) -> None:
    with torch.no_grad(), ch.watch(model := Split(None, MASKS[mask], shared), read=SPLIT) as seen:
        model(inputs())
    right = plain(seen)[0]
    places = ((0, 2), (2, 4), (4, 5), (5, 6))
    for rank, (here, whole, some, checks) in enumerate(
        answers(ranks.run(on_positions, 4, mask, shared))
    ):
        first, end = places[rank]
        for record, other, value, check in zip(here[0], right, some, checks, strict=True):
            assert record[:6] == other[:6]
            assert record[6] == (("position", first, end - first, 6),)
            assert record[7:9] == (other[7], tuple(range(first, end)))
            of_rows = [record[9][at] for at in (0, 2, 4, 5)]
            close(of_rows, [other[9][at][:, :, first:end] for at in (0, 2, 4, 5)])
            close(record[9][1], [x[:, :, first:end] for x in other[9][1]])
            close([record[9][at] for at in (3, 6, 7)], [other[9][at] for at in (3, 6, 7)])
            close(value, other[9][2][:, [1, 3], first:end])
            assert check < 1e-5
        assert here[1] == [
            f"sequence parallel: positions {first} to {end - 1} of 6 are on this rank; "
            "clearhead.distributed.gather(seen) joins those of all ranks"
        ]
        assert (whole is None) == (rank > 0)
    (_, (whole, notes), *_), *_ = answers(ranks.run(on_positions, 4, mask, shared))
    assert notes == []
    for record, other in zip(whole, right, strict=True):
        assert record[:9] == other[:9]
        close(record[9], other[9])


def cut_positions(group: Any) -> Any:
    """This rank's rows under a cut of an edge of position 4, and what a gradient hears."""
    model, mine = Split(group, masks.causal(), 4), distributed.shard(inputs(), group=group)
    with torch.no_grad(), ch.knockout(model, [(4, 1)], heads=[(0, 2), (1, 0)]) as cut:
        out = model(mine)
    try:
        with ch.knockout(model, masks.diagonal(1)):
            model(mine)
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    return out.numpy(), {pair: x > 0 for pair, x in cut.moved.items()}, said


def test_edges_are_cut_at_positions_of_the_whole(ranks: Ranks) -> None:
    model = Split(None, masks.causal(), 4)
    with torch.no_grad(), ch.knockout(model, [(4, 1)], heads=[(0, 2), (1, 0)]):
        right = model(inputs())
    found = answers(ranks.run(cut_positions, 4))
    close(torch.cat([torch.as_tensor(out) for out, *_ in found], 1), right)
    for rank, (_, moved, said) in enumerate(found):
        assert moved == {(0, 2): rank == 2, (1, 0): rank == 2}
        assert "a cut gives no gradient to those of the others" in said


def monitored_positions(group: Any, mask: str) -> Any:
    """What this rank's monitor knows after two steps."""
    model, mine = Split(group, MASKS[mask], 4), distributed.shard(inputs(), group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ch.monitor(model, alarms=False) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            model(mine).square().sum().backward()
            optimizer.step()
    return [x.numpy() for _, x in monitor.history], monitor.notes


@pytest.mark.parametrize("mask", MASKS)
def test_the_monitor_adds_up_positions(ranks: Ranks, mask: str) -> None:
    with ch.monitor(model := Split(None, MASKS[mask], 4), alarms=False) as monitor:
        model(inputs())
    right = monitor.history[0][1]
    for history, notes in answers(ranks.run(monitored_positions, 4, mask)):
        assert notes == []
        close(history, [right, right])


def half_watched(group: Any) -> str:
    """What a rank hears where the model of rank 1 alone is not watched."""
    model, mine = Split(group, masks.causal(), 4), distributed.shard(inputs(), group=group)
    watched = torch.distributed.get_rank(group) != 1
    try:
        with torch.no_grad(), ch.watch(model) if watched else contextlib.nullcontext():
            model(mine)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def test_a_model_that_is_watched_on_some_ranks_raises_on_all(ranks: Ranks) -> None:
    first, second, third, fourth = answers(ranks.run(half_watched, 4))
    for said in (first, third, fourth):
        assert (
            "model: is watched on all ranks that attend together; got rank 1, which is not" in said
        )
    assert "rank 0 refuses its arguments of distributed.attend: the model is watched on" in second


def across(group: Any) -> Any:
    """The weights of queries over other positions than their own, gathered; and under a cut."""
    draw = torch.Generator().manual_seed(5)
    query, key, value = [torch.randn(1, 2, size, 8, generator=draw) for size in (5, 9, 9)]
    whole = [query, key, value]
    mask, bias = masks.window(4), torch.randn(2, 5, 9, generator=draw)
    right = ch.attend(query, key, value, mask, bias=bias, read=readings.Weights())[1]

    def model(*tensors: Tensor) -> Tensor:
        return distributed.attend(*tensors, mask, bias=bias, group=group)

    mine = [distributed.shard(x, group=group) for x in whole]
    with ch.watch(model, read=readings.Weights()) as seen:
        model(*mine)
    try:
        with ch.knockout(model, [(4, 7)]), ch.watch(model):
            model(*mine)
        said = "nothing"
    except ValueError as error:
        said = str(error)
    found = distributed.gather(seen, group)
    return None if found is None else found[0].value.numpy(), right.numpy(), said


def test_queries_over_other_positions(ranks: Ranks) -> None:
    each = answers(ranks.run(across, 4))
    close(each[0][0], each[0][1])
    assert [found is None for found, *_ in each] == [False, True, True, True]
    for *_, said in each:
        assert said.startswith("read: is taken under the model's own mask")
