"""Every reading against its plain definition on the full weights, and the laws of merging."""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

import clearhead as ch
from clearhead import masks, readings
from clearhead._core import Sizes
from clearhead.readings import Strip

EDGES = masks.window(3) | masks.first(1)
ALL = [
    readings.Weights(), readings.Scores(), readings.Rows([2, -1, 0, 2]), readings.TopK(3),
    readings.TopK(40), readings.LogSumExp(), readings.Entropy(), readings.Entropy(normalized=True),
    readings.Received(), readings.Mass(EDGES), readings.Distance(), readings.BlockMap(4),
    readings.BlockMap(50), readings.Overlap(), readings.MaxScore(),
]  # fmt: skip
SMOOTH = [r for r in ALL if not isinstance(r, (readings.TopK, readings.BlockMap))]


def scores(query: int = 13, source: int = 17, holes: float = 0.3, seed: int = 0) -> Tensor:
    """Scores of 2 samples and 3 heads with blocked edges and one empty row, in float64."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, query, source, generator=draw, dtype=torch.float64) * 2
    x[torch.rand(x.shape, generator=draw) < holes] = -math.inf
    x[1, 2, query // 2] = -math.inf
    return x


def weigh(x: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax row by row over the allowed scores only."""
    weights, lse = torch.zeros_like(x), torch.full(x.shape[:-1], -math.inf, dtype=x.dtype)
    for at in itertools.product(*map(range, x.shape[:-1])):
        allowed = [j for j, s in enumerate(x[at].tolist()) if s > -math.inf]
        if allowed:
            top = max(x[at][j].item() for j in allowed)
            powers = {j: math.exp(x[at][j].item() - top) for j in allowed}
            total = sum(powers.values())
            lse[at] = top + math.log(total)
            for j, power in powers.items():
                weights[at][j] = power / total
    return weights, lse


def plain(reading: Any, x: Tensor) -> Any:
    """The definition of each reading in a few lines, on the full map."""
    weights, lse = weigh(x)
    *_, query, source = x.shape
    i, j = torch.arange(query)[:, None], torch.arange(source)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    count = (x > -math.inf).sum(-1)
    name = type(reading).__name__
    if name == "Weights":
        return weights
    if name == "Scores":
        return x
    if name == "Rows":
        return weights[..., list(reading.queries), :]
    if name == "TopK":
        return top(x, weights, reading.k)
    if name == "LogSumExp":
        return lse
    if name == "MaxScore":
        return x.amax(-1)
    if name == "Entropy":
        return (
            torch.where(count > 1, entropy / count.double().log(), 0)
            if reading.normalized
            else entropy
        )
    if name == "Received":
        return weights.sum(-2)
    if name == "Mass":
        return (weights * ((i + source - query - j < 3) & (j <= i + source - query) | (j < 1))).sum(
            -1
        )
    if name == "Distance":
        return (weights * (i + source - query - j).abs()).sum(-1)
    if name == "Overlap":
        flat = weights.flatten(-2)
        return torch.cosine_similarity(flat[:, :, None], flat[:, None], dim=-1)
    tiles = [
        row.tensor_split(min(reading.cells, source), -1)
        for row in weights.tensor_split(min(reading.cells, query), -2)
    ]
    mean = torch.stack([torch.stack([t.mean((-1, -2)) for t in row], -1) for row in tiles], -2)
    most = torch.stack([torch.stack([t.amax((-1, -2)) for t in row], -1) for row in tiles], -2)
    return mean, most


def top(x: Tensor, weights: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values = torch.zeros(*x.shape[:-1], k, dtype=x.dtype)
    sources = torch.full((*x.shape[:-1], k), -1)
    for at in itertools.product(*map(range, x.shape[:-1])):
        allowed = [j for j, s in enumerate(x[at].tolist()) if s > -math.inf]
        for place, j in enumerate(sorted(allowed, key=lambda j: (-weights[at][j].item(), j))[:k]):
            values[at][place], sources[at][place] = weights[at][j], j
    return values, sources


def agree(got: Any, right: Any) -> None:
    for a, b in zip(tree_leaves(got), tree_leaves(right), strict=True):
        assert a.shape == b.shape
        if not a.is_floating_point():
            assert torch.equal(a, b)
            continue
        gap = torch.where(a == b, 0, (a - b).abs())
        assert gap.max() <= 1e-12 if gap.numel() else True


def strip(x: Tensor, lse: Tensor, queries: list[int], sources: list[int]) -> Strip:
    return Strip.of(
        x[..., queries, :][..., sources], lse=lse[..., queries], queries=queries, sources=sources,
        query=x.shape[-2], source=x.shape[-1],
    )  # fmt: skip


class TestDefinitions:
    @pytest.mark.parametrize("reading", ALL, ids=repr)
    def test_of_the_whole(self, reading: Any) -> None:
        x = scores()
        agree(reading.fold([Strip.of(x, lse=weigh(x)[1])]), plain(reading, x))

    @pytest.mark.parametrize("reading", ALL, ids=repr)
    def test_the_test_notices_a_shifted_map(self, reading: Any) -> None:
        x = scores()
        with pytest.raises(AssertionError):
            agree(reading.fold([Strip.of(x.roll((1, 1, 1), (-1, -2, -3)))]), plain(reading, x))

    def test_ties_go_to_the_lower_source(self) -> None:
        x = torch.zeros(5, 40)
        x[0, [7, 30]] = 1.0
        found = readings.TopK(4).fold([Strip.of(x)])
        assert found.sources.tolist() == [[7, 30, 0, 1]] + [[0, 1, 2, 3]] * 4

    def test_short_rows_end_in_nothing(self) -> None:
        x = torch.full((1, 6), -math.inf)
        x[0, 4] = 0.0
        found = readings.TopK(3).fold([Strip.of(x)])
        assert found.sources.tolist() == [[4, -1, -1]]
        assert found.weights.tolist() == [[1.0, 0.0, 0.0]]

    def test_an_allowed_weight_of_0_is_a_source(self) -> None:
        found = readings.TopK(2).fold([Strip.of(torch.tensor([[0.0, -200.0, -math.inf]]))])
        assert found.sources.tolist() == [[0, 1]]

    def test_a_head_without_weights_is_like_no_head(self) -> None:
        x = torch.zeros(2, 3, 4)
        x[1] = -math.inf
        assert readings.Overlap().fold([Strip.of(x)]).tolist() == [[1.0, 0.0], [0.0, 0.0]]

    def test_sinks_leave_rows_below_one(self) -> None:
        x = torch.zeros(3, 4)
        lse = torch.full((3,), math.log(8.0))  # a sink with the mass of four more sources
        at = Strip.of(x, lse=lse)
        assert readings.Weights().fold([at]).sum(-1).tolist() == pytest.approx([0.5] * 3)
        right = -4 * 0.125 * math.log(0.125)
        assert readings.Entropy().fold([at]).tolist() == pytest.approx([right] * 3)

    def test_nan_stays_in_its_rows(self) -> None:
        x = torch.zeros(3, 4)
        x[1, 2] = math.nan
        for reading in (readings.Entropy(), readings.Entropy(normalized=True), readings.Distance()):
            assert reading.fold([Strip.of(x)]).isnan().tolist() == [False, True, False]


class TestMerging:
    @pytest.mark.parametrize("reading", ALL, ids=repr)
    def test_parts_add_up_in_any_order_and_grouping(self, reading: Any) -> None:
        x = scores()
        lse = weigh(x)[1]
        rows = [[0, 1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11, 12]]
        columns = [[0, 1], [2, 3, 4, 5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]]
        parts = [reading.part(strip(x, lse, r, c)) for r in rows for c in columns]
        right = plain(reading, x)
        for seed in range(4):
            left = list(parts)
            shuffle = random.Random(seed)
            while len(left) > 1:  # two parts at random become one, in a random order
                a = left.pop(shuffle.randrange(len(left)))
                b = left.pop(shuffle.randrange(len(left)))
                left.append(reading.merge(a, b))
            agree(reading.finish(left[0]), right)

    @pytest.mark.parametrize("reading", ALL, ids=repr)
    def test_interleaved_positions(self, reading: Any) -> None:
        x = scores()
        lse = weigh(x)[1]
        strips = [
            strip(x, lse, list(range(a, 13, 2)), list(range(b, 17, 3)))
            for a in range(2)
            for b in range(3)
        ]
        agree(reading.fold(strips), plain(reading, x))

    def test_the_log_sum_exp_of_chunks_is_their_logaddexp(self) -> None:
        x = scores(holes=0.1)
        lse = weigh(x)[1]
        chunks = [Strip.of(chunk).lse for chunk in x.split([2, 11, 4], -1)]
        assert torch.allclose(functools.reduce(torch.logaddexp, chunks), lse, atol=1e-12)

    @settings(max_examples=30, deadline=None)
    @given(st.data())
    def test_any_cut(self, data: st.DataObject) -> None:
        query, source = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
        reading = data.draw(st.sampled_from([r for r in ALL if not isinstance(r, readings.Rows)]))
        x = scores(query, source, data.draw(st.sampled_from([0.0, 0.4, 1.0])))
        row, column = data.draw(st.integers(0, query)), data.draw(st.integers(0, source))
        lse = weigh(x)[1]
        cuts = [
            (r, c)
            for r in (list(range(row)), list(range(row, query)))
            for c in (list(range(column)), list(range(column, source)))
        ]
        agree(reading.fold([strip(x, lse, r, c) for r, c in cuts]), plain(reading, x))


class TestGradients:
    @pytest.mark.parametrize("reading", SMOOTH, ids=repr)
    def test_gradcheck_twice(self, reading: Any) -> None:
        allowed = scores(5, 7) > -math.inf
        x = torch.randn(2, 3, 5, 7, dtype=torch.float64, requires_grad=True)

        def value(x: Tensor) -> Any:
            held = x.masked_fill(~allowed, -math.inf)
            empty = ~allowed.any(-1)
            lse = held.masked_fill(empty[..., None], 0).logsumexp(-1)
            strip = Strip.of(held, lse=lse.masked_fill(empty, -math.inf))
            found = reading.fold([strip])
            return found.masked_fill(found == -math.inf, 0)

        assert torch.autograd.gradcheck(value, (x,))
        assert torch.autograd.gradgradcheck(value, (x,))

    def test_no_nan_at_weights_of_0(self) -> None:
        x = torch.tensor([[0.0, -300.0, -math.inf]], requires_grad=True)
        for reading in (readings.Entropy(), readings.Entropy(normalized=True), readings.Distance()):
            (found,) = torch.autograd.grad(reading.fold([Strip.of(x)]).sum(), x)
            assert found.isfinite().all()


class TestMistakes:
    @pytest.mark.parametrize("make", [readings.TopK, readings.BlockMap])
    def test_counts(self, make: Any) -> None:
        with pytest.raises(ValueError, match="is at least 1; got 0"):
            make(0)
        for wrong in (2.0, True, "8"):
            with pytest.raises(TypeError, match="takes an integer"):
                make(wrong)

    def test_rows(self) -> None:
        with pytest.raises(TypeError, match="takes positions"):
            readings.Rows([0.5])  # type: ignore[list-item]
        x = torch.zeros(1, 3, 2)
        for wrong in (3, -4):
            with pytest.raises(ValueError, match=rf"0\.\.2.*got {wrong}"):
                ch.attend(x, x, x, read=readings.Rows(wrong))

    def test_mass(self) -> None:
        with pytest.raises(TypeError, match=r"takes a mask.*\n.*masks.dense"):
            readings.Mass(torch.ones(2, 2, dtype=torch.bool))  # type: ignore[arg-type]
        x = torch.zeros(1, 3, 2)
        edges = masks.dense(torch.ones(4, 4, dtype=torch.bool))
        with pytest.raises(ValueError, match="4"):
            ch.attend(x, x, x, read=readings.Mass(edges))

    def test_positions_that_do_not_fit(self) -> None:
        with pytest.raises(ValueError, match="sources: needs one position"):
            Strip.of(torch.zeros(2, 3), sources=[0, 1])

    def test_repr(self) -> None:
        assert repr(readings.TopK(8)) == "TopK(k=8)"
        assert repr(readings.Entropy()) == "Entropy(normalized=False)"


def test_true_and_false_are_no_positions() -> None:
    for positions in ([True, 0], [False, 0]):
        with pytest.raises(TypeError, match="queries: takes positions"):
            readings.Rows(positions)


@pytest.mark.parametrize("reading", ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_reading_knows_the_bytes_of_its_value(
    reading: readings.Reading, dtype: torch.dtype
) -> None:
    x = torch.randn(2, 3, 13, 5, dtype=dtype)
    key = torch.randn(2, 3, 17, 5, dtype=dtype)
    _, value = ch.attend(x, key, key, masks.causal(), read=reading)
    right = sum(part.numel() * part.element_size() for part in tree_leaves(value))
    assert reading.nbytes(Sizes(2, 3, 13, 17), dtype.itemsize) == right


def test_what_a_class_declares_of_its_gradient_is_not_inherited() -> None:
    class Own(readings.Entropy):
        pass

    assert all(reading.splits_grad for reading in ALL)
    assert not Own.splits_grad
