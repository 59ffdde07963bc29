"""attend(): every implementation against the oracle, in values, readings, gradients and dtypes."""

from __future__ import annotations

import ast
import functools
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import clearhead as ch
from clearhead import masks, readings
from clearhead.attention import Problem, available, choose
from clearhead.attention.impl import IMPLEMENTATIONS, NATIVE
from tests import oracle
from tests.cases import BY_NAME, CASES, Case, naive

F = torch.nn.functional
ALL = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
LOW = [c for c in CASES if c.query * c.sources < 1000 and c.size == 1 and abs(c.scale or 0) < 2]


@functools.cache
def answer(name: str, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], oracle.Answer]:
    given = BY_NAME[name].inputs(dtype)
    return given, BY_NAME[name].right(given)


def close(got: Tensor, right: Any, off: float = 0.0) -> None:
    """Equal within a few roundings of float32, or `off` where naive torch is further off."""
    right = oracle.array(right)
    finite = np.abs(right[np.isfinite(right)])
    allowance = max(off, 8 * torch.finfo(torch.float32).eps * max(1.0, finite.max(initial=0.0)))
    assert oracle.error(got, right) <= allowance


class TestValues:
    @ALL
    def test_context(self, implementation: Any, case: Case) -> None:
        given, right = answer(case.name)
        context = implementation(**given)
        assert context.dtype == torch.float32
        allowance = oracle.budget(naive(case, given)[0], right.context, torch.float32)
        # Without a fused multiply-add every product is rounded once more.
        unfused = implementation.name == "native" and NATIVE.state().startswith("baseline")
        assert oracle.error(context, right.context) <= allowance * (1.5 if unfused else 1)

    @ALL
    def test_readings(self, implementation: Any, case: Case) -> None:
        given, right = answer(case.name)
        edges = masks.band(2, 1)
        read = (
            *(readings.Weights(), readings.Scores(), readings.LogSumExp(), readings.Entropy()),
            *(readings.Received(), readings.Distance(), readings.Mass(edges), readings.TopK(3)),
            readings.MaxScore(),
        )
        context, values = implementation(**given, read=read)
        weights, scores, lse, entropy, received, distance, mass, top, largest = values
        assert torch.equal(context, implementation(**given))
        # Where scores are large, float32 cannot hold them better than this.
        size = np.abs(right.scores[np.isfinite(right.scores)]).max(initial=1.0)
        off = 4 * size * torch.finfo(torch.float32).eps * math.sqrt(max(case.head_dim, 1))
        close(scores, right.scores, off)
        close(weights, right.weights, off)
        close(largest, right.scores.max(-1, initial=-np.inf), off)
        close(lse, right.lse, off)
        # These add up over sources or queries, or multiply by positions.
        more = off * max(case.query, case.sources, 8)
        close(entropy, oracle.entropy(right), more)
        close(received, oracle.received(right), more)
        close(distance, oracle.distance(right), more)
        i = np.arange(case.query)[:, None] + case.sources - case.query
        j = np.arange(case.sources)
        close(mass, oracle.mass(right, (j >= i - 2) & (j <= i + 1)), more)
        close(top.weights, oracle.top(right, 3)[0], off)
        # Elsewhere weights are equal, or so in float32.
        if case in LOW and case.scale != 0 and case.head_dim:
            assert np.array_equal(top.sources, oracle.top(right, 3)[1])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    @pytest.mark.parametrize("case", LOW, ids=lambda case: case.name)
    def test_dtypes(self, implementation: Any, case: Case, dtype: torch.dtype) -> None:
        given, right = answer(case.name, dtype)
        context, lse = implementation(**given, read=readings.LogSumExp())
        assert context.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        usual, sums = naive(case, given)
        allowance = oracle.budget(usual, right.context, dtype)
        assert oracle.error(context, right.context) <= allowance
        assert oracle.error(lse, right.lse) <= oracle.budget(sums, right.lse, torch.float32)

    @ALL
    def test_gradients(self, implementation: Any, case: Case) -> None:
        given = case.inputs(torch.float64)
        leaves = [name for name in ("query", "key", "value", "bias", "sinks") if name in given]

        def gradients(attend: Any) -> list[Tensor]:
            inputs = given | {name: given[name].clone().requires_grad_() for name in leaves}
            context, lse = attend(**inputs, read=readings.LogSumExp())
            angle = torch.arange(context.numel(), dtype=torch.float64).view_as(context).sin()
            loss = (context * angle).sum() + lse.masked_fill(lse.isinf(), 0).sum()
            return list(torch.autograd.grad(loss, [inputs[name] for name in leaves]))

        ours = gradients(implementation)
        right = gradients(functools.partial(ch.attend, impl="reference"))
        for name, got, want in zip(leaves, ours, right, strict=True):
            assert not want.isnan().any(), name
            size = want.abs().max().item() if want.numel() else 0
            assert oracle.error(got, want) <= 1e-12 * max(1, size), name

    def test_the_same_inputs_give_the_same_bits(self, implementation: Any) -> None:
        given = BY_NAME["all features"].inputs()
        assert torch.equal(implementation(**given), implementation(**given))


class TestTheOracle:
    """Test the oracle with a lie: what passes a wrong answer is itself wrong."""

    @pytest.mark.parametrize("name", ["window", "grouped", "bias", "softcap", "sinks", "sliced"])
    def test_it_catches_a_lie(self, name: str) -> None:
        case = BY_NAME[name]
        given, right = answer(name)
        good = ch.attend(**given)
        allowance = oracle.budget(naive(case, given)[0], right.context, torch.float32)
        lies = {
            "scale": ch.attend(**dict(given, scale=0.43)),
            "shifted mask": ch.attend(**dict(given, mask=masks.window(5))),
            "start": ch.attend(**dict(given, mask=masks.causal("start"))),
            "values of another head": good.roll(1, 1),
            "rows swapped": good.flip(-2),
            "one NaN": good.clone().index_fill_(-1, torch.tensor([0]), torch.nan),
            "one element": good + torch.eye(*good.shape[-2:]) * 1e-5,
        }
        assert oracle.error(good, right.context) <= allowance
        for lie, wrong in lies.items():
            assert oracle.error(wrong, right.context) > allowance, lie

    def test_it_catches_heads_that_are_tiled(self) -> None:
        given, right = answer("grouped")
        tiled = given | {n: given[n].repeat(1, 3, 1, 1) for n in ("key", "value")}
        assert oracle.error(ch.attend(**tiled), right.context) > 0.1

    def test_it_does_not_share_the_softmax(self) -> None:
        row = np.exp([1.0, 2.0, 3.0]) / np.exp([1.0, 2.0, 3.0]).sum()
        got = oracle.attend([[1.0]], [[1.0], [2.0], [3.0]], [[1.0], [0.0], [0.0]])
        assert got.weights == pytest.approx(row[None])
        assert got.context == pytest.approx(row[:1][None])


class TestTheLesson:
    def test_the_mixture(self, implementation: Any) -> None:
        # Weights 3/4 and 1/4 come from scores whose difference is ln 3.
        query, key = torch.tensor([[1.0]]), torch.tensor([[math.log(3)], [0.0]])
        value = torch.tensor([[4.0, 0.0], [0.0, 8.0]])
        context, weights = implementation(query, key, value, read=readings.Weights())
        assert weights.tolist() == [pytest.approx([0.75, 0.25])]
        assert context.tolist() == [pytest.approx([3.0, 2.0])]

    def test_one_head(self, implementation: Any) -> None:
        torch.manual_seed(10)
        x = torch.randn(1, 4, 6)
        query, key, value = (torch.nn.Linear(6, 3, bias=False)(x) for _ in range(3))
        scores = query @ key.transpose(-2, -1) / math.sqrt(3)
        future = torch.triu(torch.ones(4, 4, dtype=torch.bool), diagonal=1)
        read = (readings.Scores(), readings.Weights())
        context, (ours, weights) = implementation(query, key, value, read=read)
        assert ours.shape == (1, 4, 4)
        assert context.shape == (1, 4, 3)
        torch.testing.assert_close(ours, scores)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4))
        torch.testing.assert_close(context, scores.softmax(-1) @ value)
        _, weights = implementation(query, key, value, masks.causal(), read=readings.Weights())
        assert weights[0, 0].tolist() == [1.0, 0.0, 0.0, 0.0]
        assert weights[0, 2, 3].item() == 0.0
        assert not weights[0][future].any()
        torch.testing.assert_close(weights, scores.masked_fill(future, -torch.inf).softmax(-1))

    def test_try_it(self, implementation: Any) -> None:
        x = torch.randn(2, 5, 4)
        _, scores = implementation(x, x, x, read=readings.Scores())
        assert scores.shape == (2, 5, 5)
        _, weights = implementation(x, x, x, masks.causal(), read=readings.Weights())
        assert (weights[:, 3] > 0).sum(-1).tolist() == [4, 4]


class TestLargeScores:
    """Scores that leave no room for their differences still have weights and an entropy."""

    @pytest.mark.parametrize("size", [3e38, -3e38, -torch.finfo(torch.float32).max])
    def test_equal_scores_have_the_entropy_of_their_number(
        self, implementation: Any, size: float
    ) -> None:
        x = torch.randn(1, 2, 5, 4)
        read = (readings.Entropy(), readings.Entropy(normalized=True), readings.Weights())
        bias = torch.full((5, 5), size)
        context, (entropy, share, weights) = implementation(x, x, x, bias=bias, read=read)
        torch.testing.assert_close(entropy, torch.full((1, 2, 5), 5.0).log())
        torch.testing.assert_close(share, torch.ones(1, 2, 5))
        torch.testing.assert_close(weights, torch.full((1, 2, 5, 5), 0.2))
        torch.testing.assert_close(context, x.mean(-2, keepdim=True).expand_as(x))

    @pytest.mark.parametrize("scale", [1e12, 1e30, -1e30])
    def test_a_huge_scale_picks_the_largest(self, implementation: Any, scale: float) -> None:
        leaves = [torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3)]
        query, key, value = leaves
        context, lse = implementation(*leaves, scale=scale, read=readings.LogSumExp())
        scores = query.double() @ key.double().mT * scale
        best = scores.argmax(-1)
        assert torch.equal(context, value.gather(2, best[..., None].expand(-1, -1, -1, 4)))
        torch.testing.assert_close(lse.double(), scores.amax(-1), rtol=1e-5, atol=0)
        context.sum().backward()
        counts = torch.zeros(1, 2, 9).scatter_add_(-1, best, torch.ones(1, 2, 9))
        gradients: list[Any] = [query.grad, value.grad]
        assert not gradients[0].any()
        assert torch.equal(gradients[1], counts[..., None].expand_as(value))

    def test_a_whole_number_of_many_digits(self, implementation: Any) -> None:
        x = torch.eye(4).expand(1, 1, 4, 4)
        assert torch.equal(implementation(x, x, x, scale=2**80), x)

    @pytest.mark.parametrize("scale", [torch.nan, torch.inf, 1e38, 3e38, 1e300])
    def test_a_scale_beyond_all_scores_never_passes_for_a_small_one(
        self, implementation: Any, scale: float
    ) -> None:
        x = torch.full((1, 1, 2, 4), 2.0)
        context, lse = implementation(x, x, x, scale=scale, read=readings.LogSumExp())
        assert context.isnan().all()
        assert not lse.isfinite().any()

    def test_a_score_of_minus_infinity_weighs_nothing(self, implementation: Any) -> None:
        x = torch.eye(4).expand(1, 1, 4, 4).clone()
        key = x.clone()
        key[..., 1, 0] = -torch.inf
        query = torch.ones(1, 1, 4, 4)
        read = (readings.Entropy(), readings.Entropy(normalized=True), readings.Weights())
        context, (entropy, share, weights) = implementation(query, key, x, read=read)
        third = torch.tensor([1.0, 0.0, 1.0, 1.0]) / 3
        torch.testing.assert_close(weights, third.expand_as(weights))
        torch.testing.assert_close(context, third.expand_as(context))
        torch.testing.assert_close(entropy, torch.full((1, 1, 4), 3.0).log())
        assert share.isfinite().all()


class TestEmptyRows:
    """A query that may attend to nothing is 0 everywhere, and never NaN."""

    def test_values_readings_and_gradients(self, implementation: Any) -> None:
        query, key, value = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (6, 10, 10))
        mask = torch.ones(6, 10, dtype=torch.bool).tril()
        mask[-1] = False
        read = (readings.Weights(), readings.LogSumExp(), readings.Entropy(), readings.TopK(2),
                readings.Distance(), readings.Received())  # fmt: skip
        context, (weights, lse, entropy, top, distance, received) = implementation(
            query, key, value, mask, read=read
        )
        for zero in (context, weights, entropy, distance, top.weights):
            assert not zero[:, :, -1].any()
        assert (lse[:, :, -1] == -torch.inf).all()
        assert (top.sources[:, :, -1] == -1).all()
        loss = context.square().sum() + weights.square().sum() + entropy.sum() + received.sum()
        (loss + lse[:, :, :-1].sum() + distance.sum() + top.weights.sum()).backward()
        for x in (query, key, value):
            assert x.grad is not None
            assert torch.isfinite(x.grad).all()
        assert query.grad is not None
        assert not query.grad[:, :, -1].any()

    @pytest.mark.parametrize("spelling", ["bool", "mask", "bias"])
    def test_all_spellings_of_blocked(self, implementation: Any, spelling: str) -> None:
        query, key, value = (torch.randn(2, 3, 5, 4) for _ in range(3))
        blocked = {
            "bool": {"mask": torch.zeros(5, 5, dtype=torch.bool)},
            "mask": {"mask": masks.nothing()},
            "bias": {"bias": torch.full((5, 5), -torch.inf)},
        }[spelling]
        assert not implementation(query, key, value, **blocked).any()

    def test_a_large_finite_bias_is_no_block(self, implementation: Any) -> None:
        # Every source is equally far down, so the softmax is over all of them.
        x = torch.randn(1, 1, 3, 4)
        bias = torch.zeros(3, 3)
        bias[0] = torch.finfo(torch.float32).min
        context = implementation(x, x, x, bias=bias)
        torch.testing.assert_close(context[0, 0, 0], x[0, 0].mean(0))

    def test_blocked_queries_leave_the_others_alone(self, implementation: Any) -> None:
        x = torch.randn(1, 2, 4, 3)
        mask = torch.ones(4, 4, dtype=torch.bool)
        mask[2:], mask[:, 2:] = False, False
        context = implementation(x, x, x, mask)
        assert not context[:, :, 2:].any()
        alone = implementation(x[:, :, :2], x[:, :, :2], x[:, :, :2])
        torch.testing.assert_close(context[:, :, :2], alone)

    def test_a_long_band_whose_first_tiles_are_empty(self, implementation: Any) -> None:
        x = torch.randn(1, 1, 600, 4)
        context = implementation(x, x, x, masks.window(11))
        last = implementation(x[:, :, -1:], x[:, :, -11:], x[:, :, -11:])
        torch.testing.assert_close(context[:, :, -1:], last)
        assert torch.isfinite(context).all()

    def test_gradients_where_most_sources_are_far_down(self, implementation: Any) -> None:
        query, key, value = (torch.randn(1, 1, 41, 4, dtype=torch.float64) for _ in range(3))
        far = torch.zeros(41, dtype=torch.float64)
        far[:12] = torch.finfo(torch.float64).min
        grads = []
        for more in ({"bias": far}, {"mask": torch.arange(41) >= 12}):
            inputs = [x.clone().requires_grad_() for x in (query, key, value)]
            implementation(*inputs, **more).square().sum().backward()
            grads.append([x.grad for x in inputs])
        for ours, right in zip(*grads, strict=True):
            torch.testing.assert_close(ours, right)


class TestEditsInPlace:
    """Torch refuses them in the fused implementations; nowhere do they give a wrong gradient."""

    @pytest.mark.parametrize("edited", ["context", "weights", "entropy"])
    @pytest.mark.parametrize("used", ["context", "weights", "entropy"])
    def test_refused_or_right(self, implementation: Any, edited: str, used: str) -> None:
        given = [torch.randn(1, 2, 5, 3, dtype=torch.float64) for _ in range(3)]

        def gradients(double: Any) -> Any:
            inputs = [x.clone().requires_grad_() for x in given]
            read = (readings.Weights(), readings.Entropy())
            context, (weights, entropy) = implementation(*inputs, masks.causal(), read=read)
            made = {"context": context, "weights": weights, "entropy": entropy}
            made[edited] = double(made[edited])
            return torch.autograd.grad(made[used].square().sum(), inputs, allow_unused=True)

        right = gradients(lambda x: x * 2)
        torch.testing.assert_close(gradients(lambda x: x.clone().mul_(2)), right)
        try:
            edited_in_place = gradients(lambda x: x.mul_(2))
        except RuntimeError as error:
            assert re.search("view and is being modified|modified by an inplace", str(error))  # noqa: PT017
        else:
            torch.testing.assert_close(edited_in_place, right)


class TestOddNumbers:
    """NaN and inf reach exactly the rows that may read them."""

    @pytest.mark.parametrize("non_finite", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("where", ["key", "value", "both"])
    def test_in_a_blocked_source(self, implementation: Any, where: str, non_finite: float) -> None:
        given = {n: torch.randn(2, 2, 7, 5, dtype=torch.float64) for n in ("query", "key", "value")}
        mask = masks.causal() & masks.lengths([7, 4])
        clean = [given[n].clone().requires_grad_() for n in given]
        right = implementation(*clean, mask)
        right.square().sum().backward()
        for name in ("key", "value") if where == "both" else (where,):
            given[name][1, :, 4:] = non_finite
        inputs = [given[n].clone().requires_grad_() for n in given]
        read = (readings.LogSumExp(), readings.Entropy(), readings.Received(), readings.Weights())
        context, values = implementation(*inputs, mask, read=read)
        torch.testing.assert_close(context, right, rtol=0, atol=1e-14)
        assert all(torch.isfinite(x).all() for x in values)
        context.square().sum().backward()
        for ours, wanted in zip(inputs, clean, strict=True):
            torch.testing.assert_close(ours.grad, wanted.grad, rtol=0, atol=1e-14)

    @pytest.mark.parametrize("non_finite", [torch.nan, torch.inf])
    @pytest.mark.parametrize("where", ["key", "value"])
    def test_in_an_allowed_source(self, implementation: Any, where: str, non_finite: float) -> None:
        given = {n: torch.rand(1, 2, 7, 5) for n in ("query", "key", "value")}
        right = implementation(**given, mask=masks.causal())
        given[where][0, 0, 4, 2] = non_finite
        inputs = {n: x.clone().requires_grad_() for n, x in given.items()}
        context = implementation(**inputs, mask=masks.causal())
        torch.testing.assert_close(context[0, 1], right[0, 1])
        torch.testing.assert_close(context[0, 0, :4], right[0, 0, :4])
        odd_rows = ~torch.isfinite(context[0, 0, 4:])
        assert (odd_rows.all() if where == "key" else odd_rows[:, 2].all()).item()
        # The rows before it have finite gradients, the other head too.
        context[0, 0, :4].square().sum().backward()
        assert inputs["query"].grad is not None
        assert torch.isfinite(inputs["query"].grad[0, 0, :4]).all()
        for x in inputs.values():
            assert x.grad is not None
            assert torch.isfinite(x.grad[0, 1]).all()

    @pytest.mark.parametrize("non_finite", [torch.nan, torch.inf])
    def test_in_a_query(self, implementation: Any, non_finite: float) -> None:
        given = {n: torch.rand(1, 1, 7, 5) for n in ("query", "key", "value")}
        right = implementation(**given, mask=masks.causal())
        given["query"][0, 0, 3] = non_finite
        context = implementation(**given, mask=masks.causal())
        assert torch.isnan(context[0, 0, 3]).all()
        others = [0, 1, 2, 4, 5, 6]
        torch.testing.assert_close(context[0, 0, others], right[0, 0, others])

    def test_an_empty_row_hides_a_query_of_nan(self, implementation: Any) -> None:
        query = torch.full((1, 1, 2, 3), torch.nan)
        key = torch.randn(1, 1, 4, 3, requires_grad=True)
        context = implementation(query, key, key, masks.nothing())
        assert not context.any()
        context.sum().backward()
        assert key.grad is not None
        assert not key.grad.any()

    def test_blocked_numbers_of_any_size(self, implementation: Any) -> None:
        given = {n: torch.randn(1, 1, 5, 4) for n in ("query", "key", "value")}
        right = implementation(**given, mask=masks.lengths([3]), softcap=2.0)
        given["key"][:, :, 3:], given["value"][:, :, 3:] = 3e38, -3e38
        inputs = {n: x.clone().requires_grad_() for n, x in given.items()}
        context = implementation(**inputs, mask=masks.lengths([3]), softcap=2.0)
        torch.testing.assert_close(context, right)
        context.sum().backward()
        assert all(torch.isfinite(x.grad).all() for x in inputs.values() if x.grad is not None)

    def test_denormals_are_numbers(self, implementation: Any) -> None:
        tiny = torch.full((1, 1, 3, 4), 1e-40)
        torch.testing.assert_close(implementation(tiny, tiny, tiny), tiny, rtol=1e-4, atol=0)

    def test_nan_in_the_bias_of_a_blocked_edge(self, implementation: Any) -> None:
        x, bias = torch.randn(1, 1, 4, 3), torch.zeros(4, 4)
        bias[0, 1:] = torch.nan
        context = implementation(x, x, x, masks.causal(), bias=bias)
        torch.testing.assert_close(context, implementation(x, x, x, masks.causal()))


class TestPolarity:
    def test_true_means_may_attend(self, implementation: Any) -> None:
        # Setting a source to False makes the context independent of it, for every source.
        query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
        for j in range(5):
            mask = torch.ones(5, 5, dtype=torch.bool)
            mask[:, j] = False
            before = implementation(query, key, value, mask)
            moved_key, moved_value = key.clone(), value.clone()
            moved_key[:, :, j], moved_value[:, :, j] = 9.0, -9.0
            assert torch.equal(before, implementation(query, moved_key, moved_value, mask))
            assert not torch.equal(
                implementation(query, key, value),
                implementation(query, moved_key, moved_value),
            )

    def test_a_mask_and_its_dense_form_agree(self, implementation: Any) -> None:
        x = torch.randn(2, 3, 11, 4)
        mask = (masks.causal() & masks.window(4)) | masks.first(1)
        torch.testing.assert_close(
            implementation(x, x, x, mask), implementation(x, x, x, mask.dense(11, 11))
        )

    def test_causal_composes_with_a_tensor(self, implementation: Any) -> None:
        query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
        not_first = torch.arange(4) > 0
        both = masks.causal() & masks.dense(not_first.expand(4, 4))
        context, weights = implementation(query, key, key, both, read=readings.Weights())
        assert not context[0, 0, 0].any()
        assert not weights[..., 0].any()
        assert weights[0, 0, 1].tolist() == [0.0, 1.0, 0.0, 0.0]


class TestAlignment:
    """With fewer queries than sources the last query stands at the last source."""

    def test_one_cached_query_uses_all_sources(self, implementation: Any) -> None:
        query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 16, 8)
        causal = implementation(query, key, key, masks.causal())
        torch.testing.assert_close(causal, implementation(query, key, key))
        first = implementation(query, key, key, masks.causal("start"))
        torch.testing.assert_close(first, key[:, :, :1])

    @pytest.mark.parametrize("history", [0, 3, *range(60, 71)])
    def test_chunks_equal_the_whole(self, implementation: Any, history: int) -> None:
        x = torch.randn(1, 2, history + 7, 5, dtype=torch.float64)
        mask = masks.causal() & masks.window(9)
        whole = implementation(x, x, x, mask)
        chunk = implementation(x[:, :, history:], x, x, mask)
        torch.testing.assert_close(chunk, whole[:, :, history:], rtol=0, atol=1e-12)
        steps = [
            implementation(x[:, :, t : t + 1], x[:, :, : t + 1], x[:, :, : t + 1], mask)
            for t in range(history, history + 7)
        ]
        torch.testing.assert_close(torch.cat(steps, 2), chunk, rtol=0, atol=1e-12)

    def test_later_rows_do_not_move_earlier_ones(self, implementation: Any) -> None:
        for history in range(60, 71):
            x = torch.randn(1, 1, history + 5, 4)
            before = implementation(x[:, :, history:], x, x, masks.causal())
            x[:, :, -2:] += 1.0
            after = implementation(x[:, :, history:], x, x, masks.causal())
            assert torch.equal(before[:, :, :-2], after[:, :, :-2])

    def test_a_static_cache(self, implementation: Any) -> None:
        # Ten slots, six of them filled; two new queries stand at 4 and 5.
        query, cache = torch.randn(1, 2, 2, 4), torch.randn(1, 2, 10, 4)
        filled = masks.lengths([6]) & masks.causal(4)
        torch.testing.assert_close(
            implementation(query, cache, cache, filled),
            implementation(query, cache[:, :, :6], cache[:, :, :6], masks.causal()),
        )


class TestWindows:
    def test_a_window_of_four_is_four(self, implementation: Any) -> None:
        x = torch.randn(1, 1, 12, 4)
        _, weights = implementation(x, x, x, masks.window(4), read=readings.Weights())
        assert (weights[0, 0] > 0).sum(-1).tolist() == [1, 2, 3, 4, *[4] * 8]

    def test_what_lies_outside_does_not_move_a_row(self, implementation: Any) -> None:
        x = torch.randn(1, 1, 12, 4)
        before = implementation(x, x, x, masks.window(4))
        moved = x.clone()
        moved[:, :, 3] += 5.0
        after = implementation(x, moved, moved, masks.window(4))
        changed = (before != after).any(-1)[0, 0]
        assert changed.nonzero()[:, 0].tolist() == [3, 4, 5, 6]

    def test_prefix_then_padding(self, implementation: Any) -> None:
        real = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
        x = torch.randn(2, 2, 6, 4)
        mask = (masks.prefix(4) | masks.causal()) & masks.keep(real)
        _, weights = implementation(x, x, x, mask, read=readings.Weights())
        assert not weights[0, :, :, :2].any()
        assert (weights[0, :, 0, 2:4] > 0).all()


class TestWeights:
    def test_weights_are_before_dropout(self, implementation: Any) -> None:
        x = torch.randn(2, 2, 1, 4)
        for _ in range(5):
            _, weights = implementation(x, x, x, dropout=0.2, read=readings.Weights())
            assert (weights == 1).all()

    def test_every_head_has_its_own(self, implementation: Any) -> None:
        query, key = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4)
        _, weights = implementation(query, key, key, read=readings.Weights())
        assert weights.shape == (2, 6, 5, 7)

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_weights_are_exp_of_scores_less_lse(self, implementation: Any, case: Case) -> None:
        given = case.inputs(torch.float64)
        read = (readings.Weights(), readings.Scores(), readings.LogSumExp())
        _, (weights, scores, lse) = implementation(**given, read=read)
        there = (lse > -torch.inf).unsqueeze(-1)
        again = torch.where(there, (scores - lse.unsqueeze(-1)).exp(), 0.0)
        torch.testing.assert_close(weights, again)
        rows = weights.sum(-1)
        full = torch.where(lse > -torch.inf, 1.0, 0.0).double()
        assert (rows <= full + 1e-12).all() if case.sinks else torch.allclose(rows, full)

    def test_rows_are_rows_of_the_dense_weights(self, implementation: Any) -> None:
        x = torch.randn(2, 3, 13, 4)
        read = (readings.Weights(), readings.Rows([0, 7, -1]))
        _, (weights, rows) = implementation(x, x, x, masks.causal(), read=read)
        torch.testing.assert_close(rows, weights[:, :, [0, 7, 12]])

    def test_entropy_is_lse_less_the_mean_score(self, implementation: Any) -> None:
        x = torch.randn(2, 3, 13, 4, dtype=torch.float64)
        read = (readings.Weights(), readings.Scores(), readings.LogSumExp(), readings.Entropy())
        _, (weights, scores, lse, entropy) = implementation(x, x, x, read=read)
        torch.testing.assert_close(entropy, lse - (weights * scores).sum(-1))

    def test_the_answer_mirrors_read(self, implementation: Any) -> None:
        x = torch.randn(5, 4)
        assert isinstance(implementation(x, x, x), Tensor)
        context, weights = implementation(x, x, x, read=readings.Weights())
        assert (context.shape, weights.shape) == ((5, 4), (5, 5))
        assert implementation(x, x, x, read=())[1] == ()
        context, (one,) = implementation(x, x, x, read=(readings.Entropy(),))
        assert one.shape == (5,)
        context, both = implementation(x, x, x, read=[readings.Entropy(), readings.Weights()])
        assert isinstance(both, tuple)

    @pytest.mark.parametrize(
        ("lead", "heads"), [((), ()), ((2,), ()), ((2,), (3,)), ((2, 3), (4,))]
    )
    def test_values_have_a_head_axis_where_the_inputs_do(
        self, implementation: Any, lead: tuple[int, ...], heads: tuple[int, ...]
    ) -> None:
        query, key = torch.randn(*lead, *heads, 5, 4), torch.randn(*lead, *heads, 7, 4)
        both = (*lead, *heads)
        read = {
            readings.Weights(): (*both, 5, 7),
            readings.Scores(): (*both, 5, 7),
            readings.Rows([1, 2, 3]): (*both, 3, 7),
            readings.LogSumExp(): (*both, 5),
            readings.Entropy(): (*both, 5),
            readings.MaxScore(): (*both, 5),
            readings.Distance(): (*both, 5),
            readings.Mass(masks.causal()): (*both, 5),
            readings.Received(): (*both, 7),
            readings.Overlap(): (*both, *heads),
        }
        context, values = implementation(query, key, key, read=tuple(read))
        assert context.shape == (*both, 5, 4)
        for value, shape in zip(values, read.values(), strict=True):
            assert value.shape == shape
        _, (top, cells) = implementation(
            query, key, key, read=(readings.TopK(2), readings.BlockMap(3))
        )
        assert top.weights.shape == top.sources.shape == (*both, 5, 2)
        assert cells.mean.shape == cells.max.shape == (*both, 3, 3)


class TestLeadingAxes:
    def test_lower_ranks_are_slices(self, implementation: Any) -> None:
        query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
        bias, mask = torch.randn(2, 3, 5, 7), torch.rand(2, 3, 5, 7) < 0.7
        whole, weights = implementation(query, key, key, mask, bias=bias, read=readings.Weights())
        for b in range(2):
            for h in range(3):
                part, seen = implementation(
                    query[b, h], key[b, h], key[b, h], mask[b, h], bias=bias[b, h],
                    read=readings.Weights(),
                )  # fmt: skip
                torch.testing.assert_close(part, whole[b, h])
                torch.testing.assert_close(seen, weights[b, h])
        part = implementation(query[:, 1], key[:, 1], key[:, 1], mask[:, 1], bias=bias[:, 1])
        torch.testing.assert_close(part, whole[:, 1])

    def test_more_batch_axes_are_one(self, implementation: Any) -> None:
        query, key = torch.randn(6, 2, 5, 4), torch.randn(6, 2, 7, 4)
        mask = masks.lengths([7, 1, 2, 0, 5, 6])
        flat, mass = implementation(query, key, key, mask, read=readings.Mass(mask))
        split = [x.unflatten(0, (2, 3)) for x in (query, key, key)]
        context, deep = implementation(*split, mask, read=readings.Mass(mask))
        torch.testing.assert_close(context, flat.unflatten(0, (2, 3)))
        torch.testing.assert_close(deep, mass.unflatten(0, (2, 3)))

    def test_grouped_heads_are_neighbours(self, implementation: Any) -> None:
        query, key, value = (torch.randn(1, n, 5, 3) for n in (4, 2, 2))
        wide = [x.repeat_interleave(2, 1) for x in (key, value)]
        torch.testing.assert_close(implementation(query, key, value), implementation(query, *wide))

    def test_packed_documents_equal_a_loop(self, implementation: Any) -> None:
        samples = [torch.randn(n, 4) for n in (3, 1, 5)]
        ids = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2])
        packed = torch.cat(samples)
        context = implementation(packed, packed, packed, masks.document(ids) & masks.causal())
        alone = [implementation(x, x, x, masks.causal()) for x in samples]
        torch.testing.assert_close(context, torch.cat(alone))

    def test_a_bias_with_any_strides(self, implementation: Any) -> None:
        x = torch.randn(13, 8, 77, 4)
        wide = torch.randn(13, 8, 80, 80)
        bias = wide[..., :77, 3:]
        torch.testing.assert_close(
            implementation(x, x, x, bias=bias), implementation(x, x, x, bias=bias.contiguous())
        )
        mask = (wide > 0)[..., 3:, :77]
        torch.testing.assert_close(
            implementation(x, x, x, mask), implementation(x, x, x, mask.contiguous())
        )


class TestAlibi:
    """A bias that falls with distance, as in Press et al. 2021."""

    def bias(self, slope: Tensor, size: int) -> Tensor:
        at = torch.arange(size)
        return -slope[:, None, None] * (at[:, None] - at).to(slope.dtype)

    def test_the_nearest_source_has_the_largest_bias(self, implementation: Any) -> None:
        query = torch.zeros(1, 2, 6, 4)
        bias = self.bias(torch.tensor([0.5, 0.25]), 6)
        _, weights = implementation(
            query, query, query, masks.causal(), bias=bias, read=readings.Weights()
        )
        assert weights.argmax(-1).tolist() == [[list(range(6))] * 2]
        ratio = weights[0, :, 5, 4] / weights[0, :, 5, 5]
        torch.testing.assert_close(ratio, torch.tensor([-0.5, -0.25]).exp())

    def test_one_row_for_all_queries_is_the_same_under_a_causal_mask(
        self, implementation: Any
    ) -> None:
        query, key = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(2))
        whole = self.bias(torch.tensor([0.5, 0.25], dtype=torch.float64), 9)
        row = whole[:, -1:]
        ours = [implementation(query, key, key, masks.causal(), bias=b) for b in (whole, row)]
        torch.testing.assert_close(*ours)

    def test_but_not_with_sinks(self, implementation: Any) -> None:
        query, key = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(2))
        whole = self.bias(torch.tensor([0.5, 0.25], dtype=torch.float64), 9)
        given = {"sinks": torch.zeros(2, dtype=torch.float64), "mask": masks.causal()}
        ours = [implementation(query, key, key, bias=b, **given) for b in (whole, whole[:, -1:])]
        assert oracle.error(ours[0], ours[1]) > 1e-2

    def test_nor_both_ways(self, implementation: Any) -> None:
        query, key = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(2))
        whole = -self.bias(torch.tensor([0.5, 0.25], dtype=torch.float64), 9).abs()
        ours = [implementation(query, key, key, bias=b) for b in (whole, whole[:, -1:])]
        assert oracle.error(ours[0], ours[1]) > 1e-2


class TestDropout:
    def dropped(self, implementation: Any, p: float, **more: Any) -> Tensor:
        """The mixed weights themselves: the values are the identity."""
        x = torch.zeros(2, 3, 31, 5)
        value = torch.eye(37).expand(2, 3, 37, 37)
        return implementation(x, torch.zeros(2, 3, 37, 5), value, dropout=p, **more)

    def test_the_share_and_the_scale(self, implementation: Any) -> None:
        torch.manual_seed(3)
        mixed = self.dropped(implementation, 0.3) * 37
        kept = mixed != 0
        torch.testing.assert_close(mixed[kept], torch.full_like(mixed[kept], 1 / 0.7))
        # 6882 weights: three standard deviations are 0.017.
        assert kept.double().mean().item() == pytest.approx(0.7, abs=0.017)

    def test_one_seed_drops_the_same_with_and_without_readings(self, implementation: Any) -> None:
        given = dict(BY_NAME["all features"].inputs(), dropout=0.4)
        torch.manual_seed(5)
        plain = implementation(**given)
        torch.manual_seed(5)
        seen, _ = implementation(**given, read=(readings.Weights(), readings.Entropy()))
        assert torch.equal(plain, seen)
        assert not torch.equal(plain, implementation(**given))

    def test_every_implementation_drops_the_same(self, implementation: Any) -> None:
        given = dict(BY_NAME["grouped"].inputs(), dropout=0.4)
        torch.manual_seed(5)
        ours = implementation(**given)
        torch.manual_seed(5)
        torch.testing.assert_close(ours, ch.attend(**given, impl="reference"))

    def test_the_backward_drops_the_same(self, implementation: Any) -> None:
        given = BY_NAME["grouped"].inputs(torch.float64)
        for name in ("query", "key", "value"):
            given[name].requires_grad_()
        grads = []
        for attend in (implementation, functools.partial(ch.attend, impl="reference")):
            torch.manual_seed(5)
            context = attend(**given, dropout=0.4)
            grads.append(torch.autograd.grad(context.square().sum(), list(given.values())))
        for ours, right in zip(*grads, strict=True):
            torch.testing.assert_close(ours, right)

    def test_0_and_1(self, implementation: Any) -> None:
        given = BY_NAME["plain"].inputs()
        assert torch.equal(implementation(**given, dropout=0.0), implementation(**given))
        assert not implementation(**given, dropout=1.0).any()

    def test_places_are_independent(self, implementation: Any) -> None:
        # No two rows, heads or samples drop alike, and neighbours do not go together.
        torch.manual_seed(0)
        kept = (self.dropped(implementation, 0.5) != 0).double() - 0.5
        rows = kept.flatten(0, 2)
        likeness = (rows @ rows.T).fill_diagonal_(0).abs() / 37 * 4
        assert likeness.max() < 0.95
        neighbours = (kept[..., 1:] * kept[..., :-1]).mean() * 4
        assert abs(neighbours.item()) < 0.05

    def test_the_generator_moves_once_a_call(self, implementation: Any) -> None:
        given = BY_NAME["plain"].inputs()
        torch.manual_seed(0)
        implementation(**given, dropout=0.5)
        after = torch.rand(())
        torch.manual_seed(0)
        torch.randint(2**63 - 1, ())
        assert torch.equal(after, torch.rand(()))


class TestChoice:
    def test_the_first_that_can_serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.randn(1, 1, 4, 3)
        names = [each.name for each in IMPLEMENTATIONS]
        assert names == ["native", "tiled", "reference"] == list(available())
        problem = Problem(x, x, x, None, 1.0)
        for each in IMPLEMENTATIONS:
            monkeypatch.setattr(each, "unsupported_reasons", lambda *_: [])
            assert choose(problem, (), None) is IMPLEMENTATIONS[0]
        for each, after in pairwise(IMPLEMENTATIONS):
            monkeypatch.setattr(each, "unsupported_reasons", lambda *_: ["it is Monday"])
            assert choose(problem, (), None) is after

    def test_refusing_gives_all_reasons(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.randn(1, 1, 4, 3)
        # A call that passes the fast checks asks for no reasons.
        monkeypatch.setattr(NATIVE, "plain", lambda *_: None)
        for each in IMPLEMENTATIONS[:2]:
            monkeypatch.setattr(each, "unsupported_reasons", lambda *_: ["one", "another"])
            with pytest.raises(ValueError, match=r"(?s)cannot serve.*- one.*- another"):
                ch.attend(x, x, x, impl=each.name)
        torch.testing.assert_close(ch.attend(x, x, x), ch.attend(x, x, x, impl="reference"))

    def test_each_keeps_the_contract(self) -> None:
        x = torch.randn(1, 2, 4, 3, requires_grad=True)
        problem, read = Problem(x, x, x, masks.causal(), 1.0), (readings.Entropy(),)
        for each in IMPLEMENTATIONS:
            assert isinstance(each.state(), str)
            if each.unsupported_reasons(problem, read):
                continue
            _, (value,) = each.attend(problem, read)
            (alone,) = each.readings_only(problem, read)
            assert value.requires_grad
            assert not alone.requires_grad
            assert torch.equal(value, alone)

    def test_none_imports_another(self) -> None:
        home = Path(ch.__file__).parent / "attention" / "impl"
        for name in ("native", "tiled", "reference"):
            others = {"native", "tiled", "reference"} - {name}
            files = [home / f"{name}.py"] if name == "reference" else (home / name).glob("*.py")
            for file in files:
                tree = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                modules = {node.module or "" for node in tree if isinstance(node, ast.ImportFrom)}
                assert not {f"clearhead.attention.impl.{other}" for other in others} & {
                    ".".join(module.split(".")[:4]) for module in modules
                }, file


class TestDefaultDtype:
    """What torch.set_default_dtype says is not for buffers that the caller never sees."""

    READ = (
        readings.LogSumExp(), readings.TopK(3), readings.Entropy(), readings.Received(),
        readings.BlockMap(3), readings.Mass(masks.first(2)), readings.Distance(),
        readings.Rows([0, -1]), readings.Weights(), readings.Overlap(),
    )  # fmt: skip

    @pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("size", [4, 300])
    def test_it_changes_no_bit(self, implementation: Any, default: Any, size: int) -> None:
        torch.manual_seed(3)
        query = torch.randn(1, 4, size, 16)
        key, value = torch.randn(1, 2, size + 7, 16), torch.randn(1, 2, size + 7, 24)

        def run() -> list[torch.Tensor]:
            leaves = [x.clone().requires_grad_() for x in (query, key, value)]
            context, values = implementation(*leaves, masks.causal(), read=self.READ)
            read = [x for x in tree_leaves(values) if x.requires_grad]
            ends = [context.sum(), *(x.square().sum() for x in read)]
            grads = torch.autograd.grad(ends, leaves)
            return [context, *tree_leaves(values), *grads]

        expected = run()
        torch.set_default_dtype(default)
        try:
            got = run()
        finally:
            torch.set_default_dtype(torch.float32)
        assert [x.dtype for x in got] == [x.dtype for x in expected]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))

    def test_a_reading_of_ones_own_kind_is_not_taken_for_its_parent(
        self, implementation: Any
    ) -> None:
        class Bits(readings.Entropy):
            """Its parent, under another name."""

        x = torch.randn(1, 2, 9, 8)
        _, (ours, theirs) = implementation(x, x, x, read=(Bits(), readings.Entropy()))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
