"""effects(): the same numbers as one knockout after the other, and weights as watch reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead import masks, readings
from clearhead.intervention import Effect, Effects
from tests.architectures import ALL
from tests.test_cutting import gpt, made, near, tokens

BY_NAME = {architecture.name: architecture for architecture in ALL}


# Terms of the sums on the way to the metric, each of which may round it once: in two layers over a
# width of at most 24, its fourfold in the MLP, and 11 positions; at the end over 31 logits.
ROUNDINGS = 2 * (6 * 24 + 2 * 4 * 24 + 2 * 11) + 24 + 31


def off(size: float, dtype: torch.dtype = torch.float64) -> float:
    """How far two ways to compute a number of this size may lie apart, by rounding alone."""
    return 2 * ROUNDINGS * torch.finfo(dtype).eps / 2 * max(1.0, abs(size))


def log_probability(logits: Any, ids: Any, model: Any, position: int = -1) -> torch.Tensor:
    best = model(ids)[:, position].argmax(-1, keepdim=True)
    return logits[:, position].log_softmax(-1).gather(-1, best).mean()


def maps(model: Any, ids: Any) -> torch.Tensor:
    """All weights, (layer, batch, head, query, source)."""
    with ch.watch(model, read=readings.Weights()) as seen:
        model(ids)
    return torch.stack([record.value for record in seen])


class TestAgainstOneByOne:
    @torch.no_grad()
    def test_edges(self):
        model, ids = gpt().double(), tokens()
        edges = [(10, source) for source in range(11)] + [(4, 2), (9, 9)]
        table = ch.effects(model, ids, edges=edges)
        weights, before = maps(model, ids), log_probability(model(ids), ids, model)
        assert table.before == pytest.approx(before.item(), abs=off(table.before))
        for row, (query, source) in zip(table, edges, strict=True):
            assert row.cut == (query, source)
            one = torch.zeros(11, 11, dtype=torch.bool)
            one[query, source] = True
            with ch.knockout(model, one):
                after = log_probability(model(ids), ids, gpt().double())
            assert row.effect == pytest.approx((after - before).item(), abs=off(table.before))
            assert row.weight == pytest.approx(
                weights[..., query, source].mean().item(), abs=off(1)
            )

    def test_pairs_of_any_kind(self):
        pairs = [(3, 1), (10, 2)]
        want = list(ch.effects(gpt(), tokens(), edges=pairs))
        for given in (iter(pairs), torch.tensor(pairs), dict.fromkeys(pairs).keys()):
            assert list(ch.effects(gpt(), tokens(), edges=given)) == want

    def test_positions_of_numpy(self):
        import numpy

        given, plain = ([(number(3), 1), (10, number(2))] for number in (numpy.int64, int))
        got, right = (ch.effects(gpt(), tokens(), edges=edges) for edges in (given, plain))
        assert list(got) == list(right)

    @torch.no_grad()
    def test_edges_in_some_heads(self):
        model, ids = gpt().double(), tokens()
        heads = [(0, 1), (1, 2)]
        (row,) = ch.effects(model, ids, edges=[(10, 9)], heads=heads)
        with ch.knockout(model, masks.where(lambda b, h, i, j: (i == 10) & (j == 9)), heads=heads):
            after = log_probability(model(ids), ids, gpt().double())
        before = log_probability(model(ids), ids, model)
        assert row.effect == pytest.approx((after - before).item(), abs=off(before.item()))
        weights = maps(model, ids)[..., 10, 9]
        mean = (weights[0, :, 1] + weights[1, :, 2]).mean().item() / 2
        assert row.weight == pytest.approx(mean, abs=off(1))

    @torch.no_grad()
    def test_heads(self):
        model, ids = gpt().double(), tokens()
        table = ch.effects(model, ids, metric=lambda logits: logits[:, -1, 3].sum())
        weights, before = maps(model, ids), model(ids)[:, -1, 3].sum()
        assert [row.cut for row in table] == [
            (layer, head) for layer in range(2) for head in range(3)
        ]
        for row in table:
            with ch.ablate(model, row.cut):
                after = model(ids)[:, -1, 3].sum()
            assert row.effect == pytest.approx((after - before).item(), abs=off(before.item()))
            largest = weights[row.cut[0], :, row.cut[1]].amax(-1).mean()
            assert row.weight == pytest.approx(largest.item(), abs=off(1))

    @torch.no_grad()
    def test_some_edges_of_each_head(self):
        model, ids = gpt().double(), tokens()
        edges = masks.diagonal(1)
        for row in ch.effects(model, ids, edges=edges, layers=1):
            with ch.knockout(model, edges, heads=[row.cut]):
                after = log_probability(model(ids), ids, gpt().double())
            before = log_probability(model(ids), ids, model)
            assert row.effect == pytest.approx((after - before).item(), abs=off(before.item()))
            mass = maps(model, ids)[1, :, row.cut[1]].diagonal(-1, -2, -1).mean()
            assert row.weight == pytest.approx(mass.item(), abs=off(1))

    @torch.no_grad()
    def test_sources(self):
        model, ids = gpt().double(), tokens()
        weights = maps(model, ids)
        for row in ch.effects(model, ids, sources=range(10)):
            cut = torch.zeros(11, 11, dtype=torch.bool)
            cut[:, row.cut] = True
            cut[row.cut, row.cut] = False
            with ch.knockout(model, cut):
                after = log_probability(model(ids), ids, gpt().double())
            before = log_probability(model(ids), ids, model)
            assert row.effect == pytest.approx((after - before).item(), abs=off(before.item()))
            received = weights[..., row.cut + 1 :, row.cut].mean()
            assert row.weight == pytest.approx(received.item(), abs=off(1))

    @pytest.mark.parametrize(
        ("name", "backend"),
        [
            ("Llama", "sdpa"),
            ("Llama", "eager"),
            ("GPT-2", "sdpa"),
            ("BERT", "eager"),
            ("T5", "sdpa"),
        ],
    )
    def test_models_of_transformers(self, name, backend):
        one = BY_NAME[name]
        model, inputs = made(one, backend), one.read()

        def metric(output):
            return next(iter(output.values()))[:, -1, :5].square().sum()

        together, alone = (
            ch.effects(model, inputs, metric=metric, heads=[(0, 1), (1, 0), (1, 2)], batch=batch)
            for batch in (2, 1)
        )
        assert together.before == alone.before
        single = off(together.before, torch.float32)
        for left, right in zip(together, alone, strict=True):
            assert left.weight == right.weight
            assert left.effect == pytest.approx(right.effect, abs=single)
            assert left.effect != 0


class TestSharingAForward:
    def count(self, model: Any, **options: Any) -> tuple[Effects, list[int]]:
        sizes: list[int] = []
        handle = model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
        table = ch.effects(model, tokens(), edges=[(10, j) for j in range(5)], **options)
        handle.remove()
        return table, sizes

    def test_cuts_share_a_forward(self):
        _, sizes = self.count(gpt())
        assert sizes == [2, 2, 12]
        _, sizes = self.count(gpt(), batch=2)
        assert sizes == [2, 2, 6, 6, 4]

    def test_samples_that_mix_have_a_forward_for_each_cut(self):
        class Mixing(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = gpt()

            def forward(self, ids):
                return self.inner(ids) + 0.1 * ids.float().mean() * len(ids)

        def metric(logits):
            return logits[:, -1, 3].sum()

        table, sizes = self.count(Mixing().eval(), metric=metric)
        assert sizes == [2, 2, 12, 2, 2, 2, 2, 2]
        plain, _ = self.count(gpt(), metric=metric)
        # What the other samples add is in both numbers, and in their roundings.
        single = off(max(abs(table.before), abs(plain.before)), torch.float32)
        for left, right in zip(table, plain, strict=True):
            assert left.effect == pytest.approx(right.effect, abs=single)

    def test_another_axis_of_samples(self):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(12, 3, 20)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        x = torch.randn(7, 2, 12)

        def metric(output):
            return output[-1].square().sum()

        table = ch.effects(model, x, edges=[(6, 1), (6, 2)], metric=metric)
        for row in table:
            with torch.no_grad(), ch.knockout(model, masks.where(
                lambda b, h, i, j, row=row: (i == row.cut[0]) & (j == row.cut[1])
            )):  # fmt: skip
                after = metric(model(x))
            with torch.no_grad():
                right = (after - metric(model(x))).item()
                assert row.effect == pytest.approx(right, abs=off(table.before, torch.float32))

    def test_inside_a_block(self):
        model, ids = gpt(), tokens()
        with torch.no_grad(), ch.ablate(model, [(0, 0)]):
            inside = ch.effects(model, ids, heads=[(1, 1)], metric=lambda x: x[:, -1, 3].sum())
            before = model(ids)[:, -1, 3].sum()
            with ch.ablate(model, [(1, 1)]):
                after = model(ids)[:, -1, 3].sum()
        single = off(before.item(), torch.float32)
        assert inside[0].effect == pytest.approx((after - before).item(), abs=single)


class TestWords:
    @pytest.mark.parametrize(
        ("weights", "changes", "expected"),
        [
            ([0.1, 0.2, 0.3, 0.4], [1.0, -2.0, 3.0, -9.0], 1.0),
            ([0.1, 0.2, 0.3, 0.4], [4.0, 3.0, 2.0, 1.0], -1.0),
            # ties share their rank: ranks (1, 2.5, 2.5, 4) against (1, 2, 3, 4)
            ([0.1, 0.2, 0.2, 0.4], [1.0, 2.0, 3.0, 4.0], 4.5 / (4.5 * 5) ** 0.5),
        ],
    )
    def test_rank_correlation(self, weights, changes, expected):
        rows = [Effect((0, 0), w, e) for w, e in zip(weights, changes, strict=True)]
        assert Effects(rows, 0.0).rank_correlation == pytest.approx(expected)

    def test_words(self):
        def words(changes):
            rows = [Effect(n, float(n), e) for n, e in enumerate(changes)]
            return Effects(rows, 0.0, small=0.01).words

        assert "good guide" in words([1.0, 2.0, 3.0, 4.0, 5.0])
        # Spearman of (0, 1, 2, 3, 4) and ranks (1, 0, 3, 4, 2): 1 - 6 * 8 / (5 * 24) = 0.6
        assert "rough guide" in words([2.0, 1.0, 4.0, 5.0, 3.0])
        # ranks (2, 4, 0, 1, 3): 1 - 6 * 22 / 120 = -0.1; (4, 2, 3, 1, 0): 1 - 6 * 38 / 120 = -0.9
        assert "poor guide: it says little" in words([3.0, 5.0, 1.0, 2.0, 4.0])
        assert "misleads: what has more weight makes less difference" in words([5.0, 3, 4, 2, 1])
        assert "(rank correlation -0.90)" in words([5.0, 3.0, 4.0, 2.0, 1.0])
        assert "vary too little" in words([1.0, 1.0, 1.0, 1.0, -1.0])

    def test_no_words_where_so_few_numbers_cannot_tell(self):
        def words(changes, small):
            rows = [Effect(n, float(n), e) for n, e in enumerate(changes)]
            return Effects(rows, 0.0, small).words

        assert words([1.0, 2.0], 0.0) == words([1.0] * 4, 0.0)
        assert "by eye" in words([1.0, 2.0, 3.0, 4.0], 0.0)
        assert "no cut makes a difference" in words([0.001, 0.002, -0.003, 0.004, 0.005], 0.01)
        assert "good guide" in words([0.001, 0.002, -0.003, 0.004, 0.005], 0.001)

    def test_what_counts_as_none(self):
        table = ch.effects(gpt(), tokens(), edges=[(3, 1)])
        assert table.small == 0.01
        table = ch.effects(gpt(), tokens(), edges=[(3, 1)], metric=lambda x: x[0, -1, 0] * 0 + 50)
        assert table.small == pytest.approx(0.05)

    def test_print(self):
        text = str(ch.effects(gpt(), tokens(), edges=[(3, 1), (10, 2)]))
        assert "(10, 2)" in text
        assert "by eye" in text
        by_head = str(ch.effects(gpt(), tokens()))
        assert "layer 1 head 2 " in by_head
        assert "(1, 2)" not in by_head
        assert "layer 0 head 0 " in str(ch.effects(gpt(), tokens(), edges=masks.diagonal(1)))


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"edges": []}, "edges: needs at least one thing"),
            ({"edges": [(1, -2)]}, "edges: takes positions counted from 0"),
            ({"edges": [3]}, r"edges: takes \(query, source\) pairs"),
            ({"edges": "causal"}, r"edges: is a Mask(?s:.)*masks\.parse\('causal'\)"),
            ({"edges": masks.causal}, r"edges: is a Mask(?s:.)*add \(\): masks\.causal\(\)"),
            ({"edges": [(3, 12)]}, r"edges: \(3, 12\) lies beyond(?s:.)*\(11, 11\)"),
            ({"edges": [(11, 3)]}, r"edges: \(11, 3\) lies beyond"),
            ({"edges": [(10, 0), (0, 3)]}, r"allowed by .*got \(0, 3\), which is blocked"),
            ({"edges": ~masks.causal()}, r"allowed by .*got ~causal.*, which is blocked"),
            ({"sources": [1, 11]}, r"sources: the calls have sources 0\.\.10; got 11"),
            ({"sources": [1.5]}, "sources: takes positions"),
            ({"edges": [(1, 0)], "sources": [1]}, "edges: and sources exclude each other"),
            ({"heads": [(9, 0)]}, "layers: were not all seen"),
            ({"position": 11}, "position: is within the 11 positions"),
            ({"metric": lambda x: x}, "metric: gives one number"),
            ({"metric": lambda x: "a"}, "metric: gives one number"),
        ],
    )
    def test_refusals(self, options, message):
        with pytest.raises((ValueError, TypeError), match=message):
            ch.effects(gpt(), tokens(), **options)

    def test_no_logits(self):
        layer, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(1, 3, 4)
        found = ch.effects(layer, (x, x, x), sources=[0], metric=lambda out: out[0].sum())
        near(torch.tensor(len(found)), torch.tensor(1))
        with pytest.raises(ValueError, match="metric: is needed"):
            ch.effects(lambda q: {"a": ch.attend(q, q, q)}, x, sources=[0])

    def test_no_attention(self):
        with pytest.raises(RuntimeError, match="effects: no attention call"):
            ch.effects(nn.Linear(4, 4), torch.randn(1, 3, 4), sources=[0])
