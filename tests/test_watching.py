"""Watching tiny models: every way to attend is seen, nothing changes, nothing is left behind."""

from __future__ import annotations

import copy
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead import masks, readings
from clearhead.recording import load

WEIGHTS = readings.Weights()


def plain(q: Tensor, k: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Softmax of scaled scores in float64: the weights by their definition."""
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    return (scores if allowed is None else scores.masked_fill(~allowed, -math.inf)).softmax(-1)


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)


class Head(nn.Module):
    """The lesson's head, with one way or another to mix."""

    def __init__(self, mix, heads: int = 1):
        super().__init__()
        self.mix, self.heads = mix, heads
        self.query, self.key, self.value = (nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        source = x if source is None else source
        q, k, v = self.query(x), self.key(source), self.value(source)
        if self.heads > 1:
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return self.mix(q, k, v)

    def expected(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        source = x if source is None else source
        q, k = self.query(x), self.key(source)
        q, k = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k))
        return plain(q, k)


def lesson(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ v


def functional(q, k, v):
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.mT)
    weights = F.dropout(F.softmax(scores, -1, dtype=torch.float32).to(q.dtype), 0.0)
    return torch.matmul(weights, v)


def einsum(q, k, v):
    scores = torch.einsum("...id,...jd->...ij", q, k).div(math.sqrt(q.shape[-1]))
    return torch.einsum("...ij,...jd->...id", scores.softmax(-1), v)


def turned(q, k, v):
    """Values on the left, weights transposed on the right."""
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    return (v.mT @ weights.mT).mT


def written_out(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    return exponentials / exponentials.sum(-1, keepdim=True) @ v


def folded(q, k, v):
    """Heads folded into the batch, as older code does."""
    lead = q.shape[:-2]
    q, k, v = (y.reshape(-1, *y.shape[-2:]) for y in (q, k, v))
    scores = torch.baddbmm(q.new_zeros(1), q, k.mT, beta=0, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), v).reshape(*lead, *q.shape[1:])


def refolded(q, k, v):
    """Heads folded into the batch between softmax and value only."""
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    if q.ndim < 4:
        return weights @ v
    mixed = weights.reshape(-1, *weights.shape[-2:]) @ v.reshape(-1, *v.shape[-2:])
    return mixed.reshape(q.shape)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def attend(q, k, v):
    return ch.attend(q, k, v)


WAYS = [lesson, functional, einsum, turned, written_out, folded, refolded, sdpa, attend]


class TestByWhateverMeans:
    @pytest.mark.parametrize("heads", [1, 3])
    @pytest.mark.parametrize("mix", WAYS)
    def test_weights(self, mix, heads):
        torch.manual_seed(0)
        model, x = Head(mix, heads), torch.randn(2, 5, 6)
        before = model(x)
        with ch.watch(model, read=WEIGHTS) as seen:
            after = model(x)
        assert torch.equal(before, after)
        (record,) = seen
        assert record.value.shape == (2, heads, 5, 5)
        near(record.value, model.expected(x))
        assert (record.layer, record.module, record.call, record.kind) == (0, "", 0, "self")
        assert record.scale == pytest.approx((6 / heads) ** -0.5)
        assert record.check is not None
        assert record.check < 1e-6
        assert record.mask is None

    @pytest.mark.parametrize("mix", WAYS)
    def test_one_sequence_without_a_batch(self, mix):
        model, x = Head(mix), torch.randn(5, 6)
        with ch.watch(model, read=WEIGHTS) as seen:
            model(x)
        near(seen[0].value, plain(model.query(x), model.key(x))[None, None])

    @pytest.mark.parametrize("mix", WAYS)
    def test_cross(self, mix):
        model, x, y = Head(mix, 3), torch.randn(2, 5, 6), torch.randn(2, 7, 6)
        with ch.watch(model, read=WEIGHTS) as seen:
            model(x, y)
        assert seen[0].kind == "cross"
        near(seen[0].value, model.expected(x, y))

    def test_axes_in_another_order(self):
        q, k, v = (torch.randn(2, 5, 3, 4) for _ in range(3))

        def mix():
            scores = torch.einsum("bihd,bjhd->ijbh", q, k) / 2
            return torch.einsum("ijbh,bjhd->bihd", scores.softmax(1), v)

        with ch.watch(mix, read=WEIGHTS) as seen:
            mix()
        near(seen[0].value, plain(q.transpose(1, 2), k.transpose(1, 2)))

    def test_values_shared_by_a_group_of_heads(self):
        q, k = torch.randn(2, 2, 3, 5, 4), torch.randn(2, 2, 1, 7, 4)

        def mix():
            return (q @ k.mT / 2).softmax(-1) @ k

        with ch.watch(mix, read=WEIGHTS) as seen:
            mix()
        near(seen[0].value, plain(q, k).flatten(1, 2))

    def test_a_router_or_a_classifier_is_no_attention(self):
        class Routed(nn.Module):
            def __init__(self):
                super().__init__()
                self.head, self.route = Head(lesson), nn.Linear(6, 2)
                self.experts = nn.Parameter(torch.randn(2, 6))

            def forward(self, x):
                x = self.head(x)
                return self.route(x).softmax(-1) @ self.experts

        model = Routed()
        with ch.watch(model, read=WEIGHTS) as seen:
            model(torch.randn(2, 5, 6))
        assert [record.module for record in seen] == ["head"]

    def test_a_softmax_of_one_number_is_no_attention(self):
        class Gated(nn.Module):
            def __init__(self):
                super().__init__()
                self.head, self.gate = Head(lesson), nn.Linear(6, 6)

            def forward(self, x):
                left, right = self.gate(x)[0, :2]
                return self.head(x) * torch.matmul(left, right).softmax(-1)

        model, x = Gated(), torch.randn(2, 5, 6)
        plainly = model(x)
        with ch.watch(model, read=WEIGHTS) as seen:
            assert torch.equal(model(x), plainly)
        assert [record.module for record in seen] == ["head"]
        assert not seen.notes

    def test_dropout_is_after_the_weights(self):
        q = torch.randn(1, 2, 64, 8)

        def by_hand():
            return F.dropout((q @ q.mT / math.sqrt(8)).softmax(-1), 0.5) @ q

        def fused():
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

        for mix in (by_hand, fused):
            torch.manual_seed(0)
            before = mix()
            torch.manual_seed(0)
            with ch.watch(mix, read=WEIGHTS) as seen:
                after = mix()
            assert torch.equal(before, after)
            near(seen[0].value, plain(q, q))
            assert seen[0].check is None
            assert any("dropout was on" in note for note in seen.notes)

    def test_weights_changed_after_the_softmax_show(self):
        q = torch.randn(1, 2, 6, 8)

        def mix():
            weights = (q @ q.mT / math.sqrt(8)).softmax(-1)
            return (weights * 0.5) @ q

        with ch.watch(mix, read=WEIGHTS) as seen:
            mix()
        near(seen[0].value, plain(q, q))
        assert any("its output differs" in note for note in seen.notes)


class TestMasks:
    def see(self, *, q=5, s=5, **options):
        query, key = torch.randn(2, 3, q, 4), torch.randn(2, 3, s, 4)

        def mix():
            return F.scaled_dot_product_attention(query, key, key, **options)

        with ch.watch(mix, read=WEIGHTS) as seen:
            mix()
        record: Any = seen[0]
        assert record.check < 1e-6
        return query, key, record

    @pytest.mark.parametrize(("q", "s"), [(5, 5), (3, 5), (5, 3), (1, 5)])
    def test_causal_stands_at_the_start(self, q, s):
        query, key, record = self.see(q=q, s=s, is_causal=True)
        allowed = torch.ones(q, s, dtype=torch.bool).tril()
        near(record.value, plain(query, key, allowed))
        assert torch.equal(record.mask.dense(q, s), allowed)

    def test_a_bool_mask_with_an_empty_row(self):
        allowed = torch.rand(2, 1, 5, 5) > 0.4
        allowed[0, 0, 2] = False
        query, key, record = self.see(attn_mask=allowed)
        near(record.value, plain(query, key, allowed).nan_to_num(0.0))
        assert torch.equal(record.mask.dense(5, 5, batch=2, head=3), allowed)

    @pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.float32).min])
    def test_an_additive_mask_is_told_from_a_bias(self, low):
        allowed = masks.causal().dense(5)
        bias = torch.randn(3, 5, 5)
        mask = bias.masked_fill(~allowed, low)[None]
        query, key, record = self.see(attn_mask=mask)
        scores = query.double() @ key.double().mT / 2 + bias
        near(record.value, scores.masked_fill(~allowed, -math.inf).softmax(-1))
        assert torch.equal(record.mask.dense(5, 5, head=3)[0, 0], allowed)

    def test_a_row_swamped_by_a_finite_mask_is_uniform(self):
        mask = torch.zeros(5, 5)
        mask[2] = torch.finfo(torch.float32).min
        _, _, record = self.see(attn_mask=mask)
        near(record.value[:, :, 2], torch.full((2, 3, 5), 0.2, dtype=torch.float64))

    def test_a_mask_of_one_row(self):
        keep = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])[:, None, None]
        query, key, record = self.see(attn_mask=keep)
        near(record.value, plain(query, key, keep))

    def test_hand_written_masks_are_found_in_the_scores(self):
        q = torch.randn(2, 3, 5, 4)
        future = ~masks.causal().dense(5)

        def mix():
            low = torch.finfo(q.dtype).min
            return (q @ q.mT / 2).masked_fill(future, low).softmax(-1) @ q

        with ch.watch(mix, read=readings.Scores()) as seen:
            mix()
        assert repr(seen[0].mask) == repr(masks.causal())
        assert torch.equal(seen[0].value == -math.inf, future.expand(2, 3, 5, 5))

    def test_grouped_heads(self):
        q, k = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4)

        def mix():
            return F.scaled_dot_product_attention(q, k, k, enable_gqa=True, scale=0.3)

        with ch.watch(mix, read=WEIGHTS) as seen:
            mix()
        scores = q.double() @ k.double().repeat_interleave(3, 1).mT * 0.3
        near(seen[0].value, scores.softmax(-1))
        assert seen[0].scale == 0.3


class TestTorch:
    @pytest.mark.parametrize("learning", [True, False])
    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("training", [True, False])
    def test_multihead(self, learning, need_weights, training):
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
        x, y = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
        padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
        options = {"need_weights": need_weights, "key_padding_mask": padding}
        with torch.set_grad_enabled(learning):
            before, _ = layer(x, y, y, **options)
            with ch.watch(layer, read=WEIGHTS) as seen:
                after, _ = layer(x, y, y, **options)
            _, want = layer(x, y, y, key_padding_mask=padding, average_attn_weights=False)
        assert torch.equal(before, after)
        torch.testing.assert_close(seen[0].value, want.detach(), rtol=0, atol=1e-6)
        assert seen[0].kind == "cross"

    @pytest.mark.parametrize("training", [True, False])
    def test_encoder_and_its_fast_path(self, training):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).train(training)
        x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        enabled = torch.backends.mha.get_fastpath_enabled()
        with torch.no_grad():
            with ch.watch(model, read=WEIGHTS) as seen:
                watched = model(x, src_key_padding_mask=padding)
            assert torch.backends.mha.get_fastpath_enabled() == enabled
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                slow = model(x, src_key_padding_mask=padding)
            finally:
                torch.backends.mha.set_fastpath_enabled(enabled)
        assert torch.equal(watched, slow)
        assert [record.module for record in seen] == ["layers.0.self_attn", "layers.1.self_attn"]
        assert seen[1].value[1, :, :, 3:].max() == 0
        assert any("fast path" in note for note in seen.notes) != training

    def test_whole_transformer(self):
        torch.manual_seed(0)
        model = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True).eval()
        source, target = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
        with torch.no_grad(), ch.watch(model, read=WEIGHTS) as seen:
            model(
                source,
                target,
                tgt_is_causal=True,
                tgt_mask=model.generate_square_subsequent_mask(4),
            )
        assert [record.kind for record in seen] == [
            "self",
            "self",
            "self",
            "cross",
            "self",
            "cross",
        ]
        assert [record.layer for record in seen] == list(range(6))
        assert seen[3].module == "decoder.layers.0.multihead_attn"
        assert torch.equal(seen[2].value, seen[2].value.tril())
        assert seen[3].value.shape == (2, 2, 4, 5)

    def test_own_layer(self):
        layer = ch.MultiheadAttention(8, 2, batch_first=True)
        x = torch.randn(2, 5, 8)
        with ch.watch(layer, read=WEIGHTS) as seen:
            _, want = layer(x, x, x, average_attn_weights=False)
        assert seen[0].how == "attend"
        torch.testing.assert_close(seen[0].value, want.detach(), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_flex_attention(self, compiled):
        from torch.nn.attention import flex_attention as flex

        q, k = torch.randn(1, 4, 128, 16), torch.randn(1, 2, 128, 16)
        block = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128)
        function = (
            torch.compile(flex.flex_attention, backend="eager") if compiled else flex.flex_attention
        )

        def tilted(score, b, h, i, j):
            return score + 0.1 * (h + 1) * (j - i)

        def mix():
            plainly = function(q, k, k, block_mask=block, enable_gqa=True)
            return plainly, function(q, k, k, score_mod=tilted, block_mask=block, enable_gqa=True)

        with ch.watch(mix, read=WEIGHTS) as seen:
            mix()
        allowed, spread = masks.causal().dense(128), k.repeat_interleave(2, 1)
        near(seen[0].value, plain(q, spread, allowed))
        place = torch.arange(128)
        tilt = 0.1 * torch.arange(1, 5)[:, None, None] * (place - place[:, None])
        scores = q.double() @ spread.double().mT / 4 + tilt
        want = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        near(seen[1].value, want)
        with ch.watch(mix, read=WEIGHTS, heads=[3, 0], calls=1) as seen:
            mix()
        near(seen[0].value, want[:, [3, 0]])

    @torch.no_grad()
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_one_pass_leaves_a_score_mod_to_its_own_kernel(self):
        from torch.nn.attention import flex_attention as flex

        q = torch.randn(1, 2, 128, 16)

        def mix():
            return flex.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + 0.1 * (i - j))

        plainly = mix()
        with ch.watch(mix, through=True) as seen:
            assert torch.equal(mix(), plainly)
        check = seen[0].check
        assert check is not None
        assert check < 1e-5

    def test_compiled_model(self):
        model, x = Head(sdpa, 3), torch.randn(2, 5, 6)
        compiled = torch.compile(model, backend="eager")
        before = model(x)
        with ch.watch(compiled, read=WEIGHTS) as seen:
            assert torch.equal(compiled(x), before)
        near(seen[0].value, model.expected(x))
        assert any("compiled" in note for note in seen.notes)
        assert torch.equal(compiled(x), before)

    def test_autocast(self):
        model, x = Head(sdpa, 3), torch.randn(2, 5, 6)
        with torch.autocast("cpu", torch.bfloat16):
            before = model(x)
            with ch.watch(model, read=WEIGHTS) as seen:
                assert torch.equal(model(x), before)
        assert seen[0].value.dtype == torch.float32
        torch.testing.assert_close(seen[0].value.sum(-1), torch.ones(2, 3, 5))

    def test_gradient_checkpoints_are_seen_once(self):
        from torch.utils.checkpoint import checkpoint

        model, x = Head(sdpa, 3), torch.randn(2, 5, 6, requires_grad=True)
        with ch.watch(model, read=WEIGHTS) as seen:
            checkpoint(model, x, use_reentrant=False).sum().backward()
        assert len(seen) == 1
        assert x.grad is not None


class Stack(nn.Module):
    """Three layers, the second of them used twice."""

    def __init__(self, mix=sdpa):
        super().__init__()
        self.first, self.middle, self.last = (Head(mix, 3) for _ in range(3))

    def forward(self, x):
        for layer in (self.first, self.middle, self.middle, self.last):
            y = layer(x)
            x = x + (y.transpose(1, 2).flatten(2) if y.ndim == 4 else y)
        return x


class TestChoice:
    x = torch.randn(2, 5, 6)

    def see(self, **options):
        torch.manual_seed(0)
        model = Stack()
        with ch.watch(model, **{"read": WEIGHTS, **options}) as seen:
            model(self.x)
        return list(seen)

    def test_numbers(self):
        where = [(record.layer, record.module, record.call) for record in self.see()]
        assert where == [(0, "first", 0), (1, "middle", 0), (1, "middle", 1), (2, "last", 0)]

    def test_layers_and_calls(self):
        assert [record.layer for record in self.see(layers=[0, 2])] == [0, 2]
        assert [record.layer for record in self.see(layers=-1)] == [2]
        assert [record.layer for record in self.see(layers=[-2, 0])] == [0, 1, 1]
        assert [record.call for record in self.see(calls=1)] == [1]

    def test_heads_and_queries(self):
        whole, part = self.see(), self.see(heads=[2, 0], queries=[1, -1])
        for record, some in zip(whole, part, strict=True):
            torch.testing.assert_close(some.value, record.value[:, [2, 0]][:, :, [1, 4]])
            assert some.heads == (2, 0)
            assert some.queries == (1, -1)

    def test_queries_that_no_call_has_are_refused(self):
        for wrong in (99, -9, [1, 5]):
            with pytest.raises(ValueError, match=r"queries: were not all seen.*got \["):
                self.see(queries=wrong)

    def test_calls_without_a_chosen_query_have_no_record(self):
        long, short = torch.randn(1, 6, 4), torch.randn(1, 3, 4)

        def both(x, y):
            ch.attend(x, x, x)
            ch.attend(y, y, y)

        with ch.watch(both, read=readings.Weights(), queries=[1, 4]) as seen:
            both(long, short)
        assert [record.queries for record in seen] == [(1, 4), (1,)]
        assert [tuple(record.value.shape[2:]) for record in seen] == [(2, 6), (1, 3)]
        with ch.watch(both, queries=4) as seen:
            both(long, short)
        assert [record.sizes.query for record in seen] == [6]

    def test_readings_of_chosen_queries_keep_their_places(self):
        read = (readings.Mass(masks.diagonal(1)), readings.Distance(), readings.TopK(2))
        for record, some in zip(self.see(read=read), self.see(read=read, queries=[3]), strict=True):
            torch.testing.assert_close(some.value[0], record.value[0][..., 3:4])
            torch.testing.assert_close(some.value[1], record.value[1][..., 3:4])
            assert torch.equal(some.value[2].sources, record.value[2].sources[:, :, 3:4])

    def test_nothing_is_computed_for_the_rest(self):
        class Counting(readings.Entropy):
            count = 0

            def part(self, strip):
                Counting.count += 1
                return super().part(strip)

        self.see(read=Counting(), layers=[1], calls=[0], queries=[0])
        assert Counting.count == 1

    def test_on_call_streams(self):
        got = []
        assert not self.see(on_call=got.append)
        assert [record.layer for record in got] == [0, 1, 1, 2]

    def test_value_mirrors_read(self):
        assert isinstance(self.see(read=[WEIGHTS])[0].value, tuple)
        record = self.see(read=(readings.TopK(2), readings.Entropy()))[0]
        assert record.value[0].weights.shape == (2, 3, 5, 2)
        assert record.value[1].shape == (2, 3, 5)

    @pytest.mark.parametrize("read", [(readings.Entropy(), readings.TopK(3), readings.Received())])
    def test_through(self, read):
        torch.manual_seed(0)
        model = Stack()
        before = model(self.x)
        with ch.watch(model, read=read, through=True) as seen:
            after = model(self.x)
        torch.testing.assert_close(before, after, rtol=0, atol=1e-5)
        assert after.requires_grad
        for record, other in zip(seen, self.see(read=read), strict=True):
            torch.testing.assert_close(record.value[0], other.value[0], rtol=0, atol=1e-5)
            assert record.check is not None
            assert record.check < 1e-5

    @pytest.mark.parametrize(
        ("choice", "text"),
        [
            ({"layers": [7]}, r"layers: .*\[7\][\s\S]*0 \(first\), 1 \(middle\), 2 \(last\)"),
            ({"heads": [3]}, r"heads: .*\[3\][\s\S]*0\.\.2"),
            ({"calls": [2]}, r"calls: .*\[2\][\s\S]*0\.\.1"),
            ({"layers": []}, "layers: needs at least one"),
        ],
    )
    def test_numbers_that_do_not_exist(self, choice, text):
        with pytest.raises(ValueError, match=text):
            self.see(**choice)

    def test_wrong_types(self):
        with pytest.raises(TypeError, match="layers: takes numbers"):
            self.see(layers=["one"])
        with pytest.raises(TypeError, match="read: takes readings"):
            self.see(read=("weights",))
        with pytest.raises(TypeError, match="model: is a module"), ch.watch(3):  # type: ignore
            pass


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that watching might touch."""
    dynamo = sys.modules.get("torch._dynamo")
    return {
        "attributes": {name: set(part.__dict__) for name, part in model.named_modules()},
        "hooks": {name: hooks_of(vars(part)) for name, part in model.named_modules()},
        "weights": {name: x.clone() for name, x in model.state_dict().items()},
        "training": [part.training for part in model.modules()],
        "global hooks": hooks_of(dict(vars(nn.modules.module))),
        "modes": torch._C._len_torch_function_stack(),
        "functions": (F.scaled_dot_product_attention, F.softmax, F.multi_head_attention_forward),
        "random": torch.get_rng_state().tolist(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "stance": dynamo.eval_frame._stance.stance if dynamo else None,
    }


def hooks_of(there: dict[str, Any]) -> dict[str, int]:
    return {name: len(there[name]) for name in there if "hooks" in name and there[name] is not None
            and hasattr(there[name], "__len__")}  # fmt: skip


def assert_same(before: dict, after: dict) -> None:
    weights, others = before.pop("weights"), after.pop("weights")
    assert all(torch.equal(x, others[name]) for name, x in weights.items())
    if before["stance"] is None or after["stance"] is None:
        del before["stance"], after["stance"]
    assert before == after


class TestNothingIsLeft:
    def test_after_the_block(self):
        model = Stack()
        before = state(model)
        with ch.watch(model) as seen:
            model(torch.ones(1, 4, 6))
        assert_same(before, state(model))
        assert len(seen) == 4

    def test_after_an_exception_inside(self):
        model = Stack()
        before = state(model)
        with pytest.raises(ZeroDivisionError), ch.watch(model):
            model(torch.ones(1, 4, 6) / (1 // 0))
        assert_same(before, state(model))

    def test_after_an_exception_of_the_model(self):
        model = Stack()
        before = state(model)
        with pytest.raises(RuntimeError, match="shapes"), ch.watch(model):
            model(torch.ones(1, 4, 7))
        assert_same(before, state(model))

    def test_an_exception_is_not_replaced_by_nothing_seen(self):
        with pytest.raises(ZeroDivisionError), ch.watch(Stack()):
            raise ZeroDivisionError

    def test_a_module_that_fails_inside_leaves_the_names_right(self):
        class Fussy(nn.Module):
            def __init__(self):
                super().__init__()
                self.bad, self.good = Head(lambda q, k, v: 1 / 0), Head(sdpa)

            def forward(self, x):
                try:
                    self.bad(x)
                except ZeroDivisionError:
                    return self.good(x)

        model = Fussy()
        with ch.watch(model) as seen:
            model(torch.ones(1, 4, 6))
        assert [record.module for record in seen] == ["good"]

    def test_records_outlive_the_model(self):
        import gc
        import weakref

        model = Stack()
        gone = weakref.ref(model)
        with ch.watch(model, read=WEIGHTS) as seen:
            model(torch.randn(1, 4, 6, requires_grad=True))
        del model
        gc.collect()
        assert gone() is None
        assert not any(record.value.requires_grad for record in seen)

    def test_gradients_flow_as_before(self):
        for mix in WAYS:
            torch.manual_seed(0)
            model, x = Stack(mix), torch.randn(1, 4, 6)
            twin = copy.deepcopy(model)
            twin(x).sum().backward()
            with ch.watch(model):
                model(x).sum().backward()
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)

    def test_inference_mode(self):
        model, x = Stack(), torch.ones(1, 4, 6)
        with torch.inference_mode(), ch.watch(model) as seen:
            model(x)
        assert len(seen) == 4

    def test_masks_made_in_inference_mode(self):
        def mix(x, blocked):
            mask = torch.zeros(5, 5).masked_fill_(blocked, -math.inf)
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

        x, blocked = torch.randn(1, 2, 5, 4), torch.ones(5, 5).triu(1).bool()
        with torch.inference_mode(), ch.watch(mix, read=WEIGHTS) as seen:
            mix(x, blocked)
            mix(x, blocked.mT)
        for record, edges in zip(seen, (~blocked, ~blocked.mT), strict=True):
            near(record.value, plain(x, x, edges))


class TestNothingSeen:
    def test_recurrent(self):
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn = nn.LSTM(6, 6)

            def forward(self, x):
                return self.rnn(x)[0]

        model = Recurrent()
        with (
            pytest.raises(RuntimeError, match=r"no attention call[\s\S]*without attention: LSTM"),
            ch.watch(model),
        ):
            model(torch.ones(1, 4, 6))

    def test_not_called(self):
        with pytest.raises(RuntimeError, match="not called inside"), ch.watch(Stack()):
            pass

    def test_another_thread(self):
        model = Stack()
        with (
            pytest.raises(RuntimeError, match="another thread"),
            ch.watch(model),
            ThreadPoolExecutor(1) as pool,
        ):
            pool.submit(model, torch.ones(1, 4, 6)).result()

    def test_another_model_is_not_seen(self):
        model, other = Stack(), Head(sdpa)
        with ch.watch(model) as seen:
            other(torch.ones(1, 4, 6))
            model(torch.ones(1, 4, 6))
        assert len(seen) == 4

    def test_what_cannot_be_seen_is_named(self):
        class LinearAttention(nn.Module):
            def forward(self, x):
                return F.elu(x) @ (F.elu(x).mT @ x)

        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.soft, self.linear, self.lost = Head(sdpa), LinearAttention(), Head(odd)

            def forward(self, x):
                return self.lost(self.linear(self.soft(x)))

        def odd(q, k, v):
            weights = (q @ k.mT).softmax(-2)
            return weights @ v

        model = Mixed()
        with ch.watch(model) as seen:
            model(torch.ones(1, 4, 6))
        assert [record.module for record in seen] == ["soft"]
        notes = "\n".join(seen.notes)
        assert "linear: not seen" in notes
        assert "lost: not seen, its softmax runs over axis 1" in notes

    def test_torchscript_is_named(self):
        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.soft = Head(sdpa)
                self.scripted: Any = torch.jit.trace(Head(sdpa), torch.ones(1, 4, 6))

            def forward(self, x):
                return self.scripted(self.soft(x))

        with pytest.warns(DeprecationWarning, match="jit"):
            model = Mixed()
        with ch.watch(model) as seen:
            model(torch.ones(1, 4, 6))
        assert any("scripted: not seen, it is TorchScript" in note for note in seen.notes)

    def test_data_parallel_over_devices_is_refused(self):
        model = nn.DataParallel(Stack())
        model.device_ids = [0, 1]
        with (
            pytest.raises(ValueError, match=r"DataParallel[\s\S]*watch\(model.module\)"),
            ch.watch(model),
        ):
            pass


class TestWatchInWatch:
    @pytest.mark.parametrize("mix", WAYS)
    def test_both_see_the_same(self, mix):
        model, x = Stack(mix), torch.randn(2, 5, 6)
        with ch.watch(model, read=WEIGHTS) as outer, ch.watch(model, read=WEIGHTS) as inner:
            model(x)
        assert len(outer) == len(inner) == 4
        for one, two in zip(outer, inner, strict=True):
            assert torch.equal(one.value, two.value)
            assert (one.module, one.call, one.scale) == (two.module, two.call, two.scale)

    def test_multihead(self):
        layer, x = nn.MultiheadAttention(6, 3, batch_first=True), torch.randn(2, 5, 6)
        with ch.watch(layer, read=WEIGHTS) as outer, ch.watch(layer, read=WEIGHTS) as inner:
            layer(x, x, x)
        assert torch.equal(outer[0].value, inner[0].value)


class TestSave:
    def see(self):
        model = Stack()
        with ch.watch(model, read=(readings.TopK(2), readings.Entropy())) as seen:
            model(torch.randn(2, 5, 6))
        return seen

    def test_round_trip(self, tmp_path):
        seen = self.see()
        seen.notes.append("a note")
        seen.save(tmp_path / "seen.safetensors")
        again = load(tmp_path / "seen.safetensors")
        assert again.notes == seen.notes
        for one, two in zip(seen, again, strict=True):
            assert torch.equal(one.value[0].sources, two.value[0].sources)
            assert torch.equal(one.value[1], two.value[1])
            for name in (
                "layer",
                "module",
                "call",
                "kind",
                "scale",
                "check",
                "how",
                "heads",
                "sizes",
            ):
                assert getattr(one, name) == getattr(two, name)

    @pytest.mark.parametrize(
        "mask",
        [
            masks.causal(),
            masks.causal() & masks.window(2),
            masks.keep(torch.tensor([1, 1, 0, 1, 1]).bool()),
        ],
    )
    def test_masks(self, mask, tmp_path):
        q = torch.randn(1, 2, 5, 4)

        def mix():
            return ch.attend(q, q, q, mask)

        with ch.watch(mix) as seen:
            mix()
        seen.save(tmp_path / "seen")
        again: Any = load(tmp_path / "seen")
        assert torch.equal(
            again[0].mask.dense(5).expand(1, 1, 5, 5), mask.dense(5).expand(1, 1, 5, 5)
        )

    def test_a_file_that_exists_is_left_alone(self, tmp_path):
        path = tmp_path / "seen"
        path.write_text("mine")
        with pytest.raises(FileExistsError, match="force=True"):
            self.see().save(path)
        assert path.read_text() == "mine"
        self.see().save(path, force=True)
        assert len(load(path)) == 4

    def test_other_files_are_refused(self, tmp_path):
        from safetensors.torch import save_file

        path = tmp_path / "other"
        path.write_bytes(b"not a tensor file")
        with pytest.raises(ValueError, match=r"seen\.save wrote"):
            load(path)
        save_file({"x": torch.ones(1)}, path)
        with pytest.raises(ValueError, match=r"seen\.save wrote"):
            load(path)
        header = {"clearhead": '{"schema": "clearhead.seen", "version": 99}'}
        save_file({"x": torch.ones(1)}, path, metadata=header)
        with pytest.raises(ValueError, match="version 1; got version 99"):
            load(path)
        with pytest.raises(FileNotFoundError):
            load(tmp_path / "nothing")


class TestEstimate:
    def test_bytes_are_those_of_the_values(self):
        model, x = Stack(), torch.randn(2, 33, 6)
        read = (
            readings.Weights(), readings.Rows([0, 1]), readings.TopK(4), readings.Entropy(),
            readings.Received(), readings.BlockMap(8), readings.Overlap(),
        )  # fmt: skip
        cost = ch.estimate(model, x, read=read)
        with ch.watch(model, read=read) as seen:
            model(x)
        held = [
            y
            for record in seen
            for value in record.value
            for y in ([value] if isinstance(value, Tensor) else value)
        ]
        assert cost.bytes == sum(y.numel() * y.element_size() for y in held)
        assert cost.calls == 4
        assert cost.edges == 4 * 2 * 3 * 33 * 33
        assert cost.seconds > 0
        assert "4 attention calls" in str(cost)

    def test_layers(self):
        assert ch.estimate(Stack(), torch.randn(2, 5, 6), layers=[1]).calls == 2

    def test_a_model_that_looks_at_values(self):
        class Looking(Stack):
            def forward(self, x):
                return super().forward(x) if float(x.sum()) > -1e9 else x

        assert ch.estimate(Looking(), torch.randn(2, 5, 6)).calls == 4

    def test_what_a_first_try_saw_does_not_count(self):
        class LookingBack(Stack):
            def forward(self, x):
                found = super().forward(x)
                return found if float(found.sum()) > -1e9 else x

        assert ch.estimate(LookingBack(), torch.randn(2, 5, 6)).calls == 4
