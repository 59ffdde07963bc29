"""The strips: values and gradients of the reference, memory, and that looking changes nothing."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clearhead as ch
from clearhead import masks, readings
from clearhead.attention import Problem
from clearhead.attention.impl import REFERENCE as reference
from clearhead.attention.impl import TILED as tiled
from clearhead.attention.impl.autograd import FIELDS, tensors_of
from clearhead.attention.impl.tiled import gather, stream
from clearhead.attention.impl.tiled import strips as pieces
from clearhead.attention.impl.tiled import tiled as tiled_module
from tests import oracle

FIVE = (
    readings.LogSumExp(), readings.TopK(3), readings.Entropy(), readings.Received(),
    readings.BlockMap(5),
)  # fmt: skip
ALL = (
    *FIVE, readings.Weights(), readings.Scores(), readings.Rows([0, -1]), readings.TopK(40),
    readings.Entropy(normalized=True), readings.Distance(), readings.Overlap(),
    readings.Mass(masks.diagonal(1)), readings.Mass(masks.window(4) | masks.first(2)),
    readings.MaxScore(),
)  # fmt: skip
SMOOTH = tuple(r for r in ALL if not isinstance(r, readings.TopK))


def problem(
    query: int, source: int, mask: Any = None, *, batch: Any = (2,), head: int = 4, group: int = 2,
    width: int = 6, value: int = 6, start: int = 0, dtype: Any = torch.float32, **more: Any,
) -> Problem:  # fmt: skip
    draw = torch.Generator().manual_seed(start)
    shapes = [(head, query, width), (head // group, source, width), (head // group, source, value)]
    q, k, v = (torch.randn(*batch, *shape, generator=draw).to(dtype) for shape in shapes)
    mask = masks.dense(mask) if isinstance(mask, Tensor) else mask
    return Problem(q, k, v, mask, width**-0.5, **more)


def random_mask(*shape: int, share: float = 0.4, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Bounds that depend on the error of another answer are met or missed by the numbers drawn."""
    torch.manual_seed(0)


@pytest.fixture
def strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make strips of a few rows, so that small problems have many."""
    monkeypatch.setattr(stream, "ROWS", 5)
    monkeypatch.setattr(stream, "ELEMENTS", 300)
    monkeypatch.setattr(tiled_module, "ELEMENTS", 1)
    monkeypatch.setattr(tiled_module, "ROWS", 7)
    monkeypatch.setattr(pieces, "WIDTH", 8)


def wide(p: Problem) -> Problem:
    """The same numbers in float64."""
    tensors = {name: getattr(p, name) for name in FIELDS}
    return replace(p, **{name: x.double() for name, x in tensors.items() if x is not None})


def agree(p: Problem, read: Any, how: Any = None, passes: int = 1) -> None:
    """Hold the strips to at most twice the error of the reference, beside it in float64.

    In float64 the reference has no error beside itself: there each term of the sums over queries
    and sources may round once, in every pass over them.
    """
    how = how or (lambda impl, p: impl.attend(p, read))
    got, plain, right = how(tiled, p), how(reference, p), how(reference, wide(p))
    terms = p.query.shape[-2] + p.key.shape[-2]
    roundings = passes * terms if p.dtype == torch.float64 else 1
    near(got, plain, right, p.value, roundings)


def near(got: Any, plain: Any, right: Any, value: Tensor, roundings: int = 1) -> None:
    """Allow twice the error of `plain`, and some roundings of the largest number that is summed."""
    largest = max(1, value.abs().max().item()) if value.numel() else 1
    for a, b, c in zip(*map(tree_leaves, (got, plain, right)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not a.is_floating_point():
            assert (a != b).sum() <= 0.002 * a.numel()  # weights that differ by a rounding
            continue
        size = max([largest, *c[c.isfinite()].abs().tolist()])
        rounding = roundings * torch.finfo(a.dtype).eps * size
        assert oracle.error(a, c) <= 2 * oracle.error(b, c) + rounding


def agree_on_gradients(p: Problem, read: Any) -> None:
    agree(p, read, lambda impl, p: pull(impl, p, read))


MASKS: dict[str, Any] = {
    "none": lambda q, s: None,
    "causal": lambda q, s: masks.causal(),
    "causal from the start": lambda q, s: masks.causal("start"),
    "window": lambda q, s: masks.window(9),
    "sinks and window": lambda q, s: (masks.window(9) | masks.first(3)) & masks.causal(),
    "outside": lambda q, s: masks.everything() - masks.window(11),
    "lengths": lambda q, s: masks.lengths([s, s // 3]) & masks.causal(),
    "heads": lambda q, s: random_mask(1, 4, q, s),
    "samples": lambda q, s: random_mask(2, 1, q, s),
    "both, sparse": lambda q, s: random_mask(2, 4, q, s, share=0.02),
    "nothing": lambda q, s: masks.nothing(),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": torch.tensor([[[0.7]], [[-1.3]], [[2.1]], [[0.0]]])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "dropout": {"dropout": 0.3, "seed": torch.tensor(11)},
    "wide values": {"value": 11},
}


class TestValues:
    @pytest.mark.parametrize("features", FEATURES)
    @pytest.mark.parametrize("mask", MASKS)
    def test_of_the_reference(self, strips: None, mask: str, features: str) -> None:
        for query, source in ((31, 47), (23, 19)):
            p = problem(query, source, MASKS[mask](query, source), **FEATURES[features])
            agree(p, ALL)

    @pytest.mark.parametrize("size", [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 257])
    def test_edges_of_strips_and_groups(self, size: int) -> None:
        p = problem(size, size, masks.causal(), head=2, group=1)
        agree(p, ALL)

    @pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1)])
    @pytest.mark.parametrize("batch", [(), (0,), (2, 3)])
    def test_sizes_of_none_and_one(self, shape: Any, batch: Any) -> None:
        read = tuple(r for r in ALL if not isinstance(r, readings.Rows))
        p = problem(shape[0], shape[1], masks.causal(), batch=batch)
        agree(p, read)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(9)])
    def test_dtypes(self, dtype: Any, mask: Any) -> None:
        p = problem(67, 67, mask, dtype=dtype, width=16, value=16)
        agree(p, ALL)

    @pytest.mark.parametrize("scale", [0.0, -0.7, 1e-30, 40.0])
    def test_any_scale(self, scale: float) -> None:
        p = replace(problem(33, 41, masks.causal()), scale=scale)
        agree(p, FIVE)

    def test_weights_sum_to_one_where_scores_are_large(self) -> None:
        p = replace(problem(50, 300), scale=20.0)
        _, (top, received) = tiled.attend(p, (readings.TopK(300), readings.Received()))
        # Scores are so far apart that few weights count: eight roundings of 1 in each of 50 rows. A
        # weight made of score - lse would be off by a rounding of the lse, of some 200 here.
        rounding = torch.finfo(torch.float32).eps
        assert (top.weights.sum(-1) - 1).abs().max() < 8 * rounding
        assert (received.sum(-1) - 50).abs().max() < 50 * 8 * rounding

    @pytest.mark.parametrize("name", ["positions", "heads", "features", "everything"])
    def test_expanded_inputs(self, name: str) -> None:
        p = problem(33, 33, masks.causal(), group=1)
        at = {"positions": (2, 4, 1, 6), "heads": (2, 1, 33, 6), "features": (2, 4, 33, 1)}
        x = torch.randn(at.get(name, (1, 1, 1, 1))).expand(2, 4, 33, 6)
        p = replace(p, query=x, key=x, value=x)
        agree(p, FIVE[:1] + FIVE[2:])

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def test_any_shape(self, data: st.DataObject) -> None:
        size = st.integers(1, 40)
        head = data.draw(st.sampled_from([1, 2, 4, 6]))
        group = data.draw(st.sampled_from([g for g in (1, 2, 3, 6) if head % g == 0]))
        query, source = data.draw(size), data.draw(size)
        batch = data.draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
        varying = (math.prod(batch) if data.draw(st.booleans()) else 1,
                   head if data.draw(st.booleans()) else 1)  # fmt: skip
        share = data.draw(st.sampled_from([0.02, 0.5, 1.0]))
        mask = random_mask(*varying, query, source, share=share)
        k = data.draw(st.integers(1, 12))
        width, value = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
        sizes = {"batch": batch, "head": head, "group": group, "width": width, "value": value}
        p = problem(query, source, mask, **sizes)
        read = (readings.TopK(k), *FIVE, readings.BlockMap(k), readings.Entropy(normalized=True))
        agree(p, read)


class TestTopK:
    def test_ties_go_to_the_lower_source(self) -> None:
        for source in (9, 70, 600, 5000):
            p = problem(3, source, batch=(1,), head=1, group=1)
            p.key[:] = p.key[..., :1, :]
            _, (top,) = tiled.attend(p, (readings.TopK(8),))
            assert top.sources.tolist() == [[[list(range(8))] * 3]]

    def test_a_tie_with_what_was_left_out(self) -> None:
        # Twelve equal largest weights in twelve groups; the four lowest sources win.
        p = problem(2, 700, batch=(1,), head=1, group=1, width=1)
        places = torch.randperm(700, generator=torch.Generator().manual_seed(5))[:12]
        p.query.fill_(1.0)
        p.key.uniform_(-1, 0)[..., places, :] = 1.0
        _, (top,) = tiled.attend(p, (readings.TopK(4),))
        assert top.sources[0, 0, 0].tolist() == sorted(places.tolist())[:4]

    def test_weights_that_underflow_are_sources(self) -> None:
        p = problem(2, 300, masks.first(40), batch=(1,), head=1, group=1, width=1)
        p.query.fill_(500.0)
        p.key.fill_(-1.0)[..., 17, :] = 1.0
        _, (top,) = tiled.attend(p, (readings.TopK(5),))
        assert top.sources[0, 0, 1].tolist() == [17, 0, 1, 2, 3]

    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 900), st.integers(1, 20), st.integers(1, 6), st.integers(0, 99))
    def test_of_few_values(self, width: int, k: int, levels: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        weights = torch.randint(0, levels, (1, 2, width), generator=draw).float() / levels
        one = problem(2, width, batch=(1,), head=1, group=1)
        found = gather.TopK(one, readings.TopK(k), gather.Layout(height=2))
        allowed = torch.ones_like(weights, dtype=torch.bool)
        view = _View(weights, allowed)
        found.see(view)  # type: ignore[arg-type]
        for row, sources in zip(weights[0].tolist(), found.sources[0].tolist(), strict=True):
            right = sorted(range(width), key=lambda j, row=row: (-row[j], j))[:k]
            assert sources == right + [-1] * (k - len(right))


class _View:
    """As much of a view as the largest weights are taken from."""

    poisoned = False

    def __init__(self, weights: Tensor, allowed: Tensor):
        self.weights, self.allowed, self.leads = weights, allowed, slice(0, 1)
        self.shift = torch.zeros(weights.shape[:-1])
        self.piece = pieces.Piece(slice(0, 2), slice(0, weights.shape[-1]), slice(0, 0))

    def positions(self, columns: Tensor) -> Tensor:
        return columns

    def scores(self, rows: Tensor) -> Tensor:
        """What orders as the weights do."""
        return self.weights[rows]


class TestGradients:
    @pytest.mark.parametrize("read", [(), SMOOTH], ids=["context", "readings"])
    @pytest.mark.parametrize("features", FEATURES)
    @pytest.mark.parametrize("mask", MASKS)
    def test_of_the_reference(self, strips: None, mask: str, features: str, read: Any) -> None:
        p = problem(17, 23, MASKS[mask](17, 23), dtype=torch.float64, **FEATURES[features])
        agree_on_gradients(p, read)

    @pytest.mark.parametrize("features", FEATURES)
    def test_gradcheck_twice(self, features: str) -> None:
        mask = random_mask(2, 2, 3, 4)
        mask[0, 1, 1] = False
        more: Any = {k: v[:2].double() if isinstance(v, Tensor) and v.ndim else v
                for k, v in FEATURES[features].items()}  # fmt: skip
        p = problem(3, 4, mask, head=2, width=2, dtype=torch.float64, **(more | {"value": 2}))
        read = (readings.Entropy(), readings.Mass(masks.first(2)), readings.Received())
        inputs = [x.clone().requires_grad_() for x in tensors_of(p) if x is not None]

        def answer(*given: Tensor) -> Any:
            fields = [n for n in FIELDS if getattr(p, n) is not None]
            context, values = tiled.attend(
                replace(p, **dict(zip(fields, given, strict=True))), read
            )
            return context, *values

        assert torch.autograd.gradcheck(answer, inputs)
        assert torch.autograd.gradgradcheck(answer, inputs)

    def test_one_tensor_as_query_key_and_value(self) -> None:
        def twice(impl: Any, p: Problem) -> Any:
            one = p.query.clone().requires_grad_()
            context, _ = impl.attend(Problem(one, one, one, masks.causal(), 0.5), ())
            (first,) = torch.autograd.grad(context.pow(2).sum(), one, create_graph=True)
            (second,) = torch.autograd.grad(first.pow(2).sum(), one)
            return first.detach(), second

        x = torch.randn(1, 2, 9, 4, dtype=torch.float64)
        agree(Problem(x, x, x, masks.causal(), 0.5), (), twice, passes=4)

    def test_a_bias_of_any_broadcast(self) -> None:
        for shape in [(), (1,), (37,), (29, 1), (4, 1, 37), (2, 1, 29, 37), (1, 1, 1, 1)]:
            p = problem(29, 37, masks.causal(), bias=torch.randn(shape), dtype=torch.float32)
            agree_on_gradients(p, ())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype: Any) -> None:
        p = problem(67, 67, masks.causal(), dtype=dtype, width=16, value=16)
        agree_on_gradients(p, ())


def pull(impl: Any, p: Problem, read: Any) -> list[Tensor]:
    """The gradients of all inputs, of a weighted sum of all outputs."""
    fields = [name for name in FIELDS if getattr(p, name) is not None]
    inputs = [getattr(p, name).detach().clone().requires_grad_() for name in fields]
    context, values = impl.attend(replace(p, **dict(zip(fields, inputs, strict=True))), read)
    draw = torch.Generator().manual_seed(3)
    total = context.new_zeros(())
    for x in (context, *tree_leaves(values)):
        # A matrix product with inf or a NaN would hide what is tested.
        weight = torch.randn(x.shape, generator=draw).to(x.dtype)
        if x.requires_grad:
            total = total + (torch.where(x.isfinite(), x, 0) * weight).sum()
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    pairs = zip(found, inputs, strict=True)
    return [torch.zeros_like(x) if g is None else g for g, x in pairs]


# By how much two implementations may differ, of values up to 4: each rounds a score (8 times, of
# sums of six products that are at most 12 in all) and the log-sum-exp as much, which a weight has
# as its relative error, and then each of 23 products of a weight and a value.
OFF = 2 * (2 * 8 * 12 + 23) * torch.finfo(torch.float32).eps / 2


class TestHostileValues:
    BAD = (math.nan, math.inf, -math.inf, 3e38, 1e-42)

    @pytest.mark.parametrize("bad", BAD)
    @pytest.mark.parametrize("name", ["query", "key", "value"])
    def test_only_rows_that_may_read_it_change_a_bit(self, name: str, bad: float) -> None:
        for mask in (masks.causal(), masks.dense(torch.ones(41, 41).tril().bool())):
            p = problem(41, 41, mask, head=2, group=1)
            moved = getattr(p, name).clone()
            moved[:, :, 23] = bad
            before = tiled.attend(p, FIVE)
            after = tiled.attend(replace(p, **{name: moved}), FIVE)
            rows = slice(0, 23)
            assert torch.equal(before[0][:, :, rows], after[0][:, :, rows])
            for i in (0, 2):
                assert torch.equal(before[1][i][..., rows], after[1][i][..., rows])
            assert torch.equal(
                before[1][1].weights[..., rows, :], after[1][1].weights[..., rows, :]
            )
            if math.isnan(bad):
                assert after[0][:, :, 23].isnan().all()

    @pytest.mark.parametrize("bad", BAD)
    @pytest.mark.parametrize("name", ["query", "key", "value"])
    @pytest.mark.parametrize("features", ["plain", "softcap", "sinks", "dropout", "bias"])
    def test_of_the_reference(self, features: str, name: str, bad: float) -> None:
        for mask in (None, masks.causal(), random_mask(2, 4, 23, 23)):
            p = problem(23, 23, mask, **FEATURES[features])
            getattr(p, name)[1, :, 11, 2] = bad
            got, right = tiled.attend(p, ())[0], reference.attend(p, ())[0]
            assert torch.equal(got.isnan(), right.isnan())
            torch.testing.assert_close(got, right, rtol=OFF, atol=4 * OFF, equal_nan=True)

    def test_a_nan_stays_in_its_column_of_what_is_received(self) -> None:
        p = problem(41, 41, masks.causal(), head=2, group=1)
        p.query[:, :, 23] = math.nan
        _, (received, blocks) = tiled.attend(p, (readings.Received(), readings.BlockMap(41)))
        assert received.isnan().tolist() == [[[j <= 23 for j in range(41)]] * 2] * 2
        right = torch.zeros(41, 41, dtype=torch.bool)
        right[23, :24] = True
        assert torch.equal(blocks.mean.isnan(), right.expand(2, 2, 41, 41))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("read", [(), SMOOTH[2:5]], ids=["context", "readings"])
    def test_gradients_of_what_nobody_reads_are_0(self, bad: float, read: Any) -> None:
        mask = torch.ones(23, 23, dtype=torch.bool)
        mask[:, 11], mask[5] = False, False
        p = problem(23, 23, mask)
        for name, at in (("key", 11), ("value", 11), ("query", 5)):
            getattr(p, name)[:, :, at] = bad
        query, key, value = pull(tiled, p, read)
        for x, at in ((query, 5), (key, 11), (value, 11)):
            assert x.isfinite().all()
            assert (x[:, :, at] == 0).all()


class TestLooking:
    @pytest.mark.parametrize("features", FEATURES)
    @pytest.mark.parametrize("mask", MASKS)
    def test_changes_no_bit(self, strips: None, mask: str, features: str) -> None:
        p = problem(31, 47, MASKS[mask](31, 47), **FEATURES[features])
        context = tiled.attend(p, ())[0]
        for read in (FIVE, ALL, (readings.Entropy(),), (readings.Mass(masks.first(1)),)):
            assert torch.equal(context, tiled.attend(p, read)[0])
        leaf = replace(p, query=p.query.clone().requires_grad_())
        assert torch.equal(context, tiled.attend(leaf, ALL)[0])

    def test_twice_is_the_same(self) -> None:
        p = problem(300, 300, masks.causal())
        first, second = tiled.attend(p, ALL), tiled.attend(p, ALL)
        assert all(map(torch.equal, tree_leaves(first), tree_leaves(second)))

    def test_without_the_context(self) -> None:
        for features in FEATURES.values():
            p = problem(67, 67, masks.causal(), **features)
            values, right = tiled.readings_only(p, ALL), tiled.attend(p, ALL)[1]
            assert all(map(torch.equal, tree_leaves(values), tree_leaves(right)))

    def test_dropout_drops_the_weights_that_the_reference_drops(self) -> None:
        p = problem(90, 50, masks.causal(), dropout=0.5, seed=torch.tensor(3))
        p.query.zero_()
        agree(p, ())


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return made


class TestMemory:
    @pytest.mark.parametrize("features", ["plain", "softcap", "bias"])
    @pytest.mark.parametrize(
        "mask",
        [
            None,
            masks.causal(),
            masks.window(9) | masks.first(2),
            masks.where(lambda b, h, i, j: i >= j),
        ],
        ids=["none", "causal", "sinks and window", "a function"],
    )
    def test_no_tensor_of_query_times_source(
        self, mask: Any, features: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stream, "ELEMENTS", 1 << 12)
        monkeypatch.setattr(stream, "ROWS", 16)
        monkeypatch.setattr(tiled_module, "ELEMENTS", 1 << 12)
        monkeypatch.setattr(tiled_module, "ROWS", 8)
        size = 300
        more: Any = {"bias": torch.zeros(1, size)} if features == "bias" else FEATURES[features]
        p = problem(size, size, mask, batch=(), head=1, group=1, **more)
        read = tuple(r for r in ALL if not isinstance(r, (readings.Weights, readings.Scores)))
        p.query.requires_grad_()
        with Largest() as largest:
            context, values = tiled.attend(p, read)
            torch.autograd.grad(context.sum() + values[0].sum() + values[2].sum(), p.query)
        assert largest.elements < size * size / 4

    def test_the_test_notices_the_reference(self) -> None:
        p = problem(300, 300, batch=(), head=1, group=1)
        with Largest() as largest:
            reference.attend(p, ())
        assert largest.elements >= 300 * 300


class TestChoice:
    def test_reasons(self) -> None:
        p = problem(3, 3)
        assert tiled.unsupported_reasons(p, ALL) == []

        class Own(readings.Entropy):
            pass

        assert tiled.unsupported_reasons(p, (Own(),)) == []
        p.query.requires_grad_()
        assert "split its gradient" in tiled.unsupported_reasons(p, (Own(),))[0]

        class Subclass(Tensor):
            pass

        p = replace(p, key=p.key.as_subclass(Subclass))
        assert "subclass" in tiled.unsupported_reasons(p, ())[0]
        assert tiled.unsupported_reasons(replace(p, query=p.query.to("meta")), ())

    def test_attend_can_ask_for_it(self) -> None:
        x = torch.randn(2, 5, 4)
        ways = ((x, "tiled"), (x, "reference"), (x.double(), "reference"))
        got, plain, right = (
            ch.attend(y, y, y, masks.causal(), read=FIVE, impl=impl) for y, impl in ways
        )
        near(got, plain, right, x)

    def test_parts_of_strips_merge_to_the_whole(self) -> None:
        # What an implementation reads strip by strip is what the public fold gives.
        p = problem(20, 30, masks.causal(), group=1)
        _, (scores, lse, *values) = tiled.attend(p, (readings.Scores(), *FIVE))
        halves = itertools.product((range(0, 9), range(9, 20)), (range(0, 7), range(7, 30)))
        strips = [
            readings.Strip.of(scores[..., r, :][..., c], lse=lse[..., r], queries=r, sources=c,
                              query=20, source=30) for r, c in halves
        ]  # fmt: skip
        folded = [reading.fold(strips) for reading in FIVE[1:]]
        plain, right = (reference.attend(each, FIVE[1:])[1] for each in (p, wide(p)))
        near(folded, plain, right, p.value)
        near(values, plain, right, p.value)
