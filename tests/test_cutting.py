"""Cutting attention: against the same model under another mask, or with its weights edited."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.architectures import ALL
from tests.test_watching import WAYS, Head
from torch import Tensor, nn

import clearhead as ch
from clearhead import masks, readings
from clearhead.models import GPT

BY_NAME = {architecture.name: architecture for architecture in ALL}
LENGTH = 11


def near(got: Tensor, want: Tensor, atol: float = 2e-6) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=atol)


def some_edges(query: int = LENGTH, source: int | None = None) -> Tensor:
    """About half of all edges, but never those of a position to itself."""
    draw = torch.Generator().manual_seed(7)
    edges = torch.rand(query, source or query, generator=draw) < 0.5
    return edges & ~torch.eye(query, source or query, dtype=torch.bool)


def first_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else next(iter(output.values()))


def gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(31, layers=2, heads=3, width=24, length=32, **options).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def tokens(batch: int = 2, length: int = LENGTH, vocabulary: int = 31) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary, (batch, length), generator=draw)


class TestEveryWayToAttend:
    @staticmethod
    def by_hand(model: Head, x: Tensor, cut: Tensor, zeroed: Tensor, source: Tensor) -> Tensor:
        """The lesson's equation in float64, with edges cut before and after the softmax."""
        q, k, v = (
            layer(y).double().unflatten(-1, (model.heads, -1)).transpose(1, 2)
            for layer, y in ((model.query, x), (model.key, source), (model.value, source))
        )
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(cut, -math.inf)
        weights = scores.softmax(-1).nan_to_num(0.0).masked_fill(zeroed, 0.0)
        context = weights @ v
        return context if model.heads > 1 else context[:, 0]

    @pytest.mark.parametrize("heads", [1, 3])
    @pytest.mark.parametrize("mix", WAYS)
    def test_edges(self, mix, heads):
        torch.manual_seed(0)
        model, x, y = Head(mix, heads), torch.randn(2, 5, 6), torch.randn(2, 7, 6)
        some, no = some_edges(5, 7), torch.zeros(5, 7, dtype=torch.bool)
        some[2] = True
        with ch.knockout(model, some):
            near(model(x, y), self.by_hand(model, x, some, no, y))
        with ch.zero_weights(model, some):
            near(model(x, y), self.by_hand(model, x, no, some, y))

    @pytest.mark.parametrize("mix", WAYS)
    def test_one_head_of_three(self, mix):
        torch.manual_seed(0)
        model, x = Head(mix, 3), torch.randn(2, 5, 6)
        own = model(x)
        with ch.knockout(model, some_edges(5), heads=1) as cut:
            changed = model(x)
        want = torch.zeros(3, 5, 5, dtype=torch.bool)
        want[1] = some_edges(5)
        near(changed, self.by_hand(model, x, want, torch.zeros_like(want), x))
        assert torch.equal(changed[:, [0, 2]], own[:, [0, 2]])
        assert set(cut.moved) == {(0, 1)}
        assert cut.moved[0, 1] == pytest.approx((changed - own).abs().max().item())

    @pytest.mark.parametrize("mix", WAYS)
    def test_rows_without_a_cut_keep_their_bits(self, mix):
        torch.manual_seed(0)
        model, x = Head(mix, 3), torch.randn(2, 5, 6)
        one = torch.zeros(5, 5, dtype=torch.bool)
        one[3, 1] = True
        with ch.knockout(model, one):
            changed = model(x)
        same = (changed == model(x)).all(-1).all(0).all(0)
        assert same.tolist() == [True, True, True, False, True]

    @pytest.mark.parametrize("mix", WAYS)
    def test_nothing_left_is_zero_with_gradient_zero(self, mix):
        torch.manual_seed(0)
        model, x = Head(mix, 3), torch.randn(2, 5, 6, requires_grad=True)
        with ch.knockout(model, masks.everything()):
            changed = model(x)
        changed.sum().backward()
        assert changed.abs().max() == 0
        assert x.grad is not None
        assert x.grad.abs().max() == 0
        with ch.ablate(model):
            assert torch.equal(model(x), changed)

    @pytest.mark.parametrize("mix", WAYS)
    def test_gradients(self, mix):
        torch.manual_seed(0)
        model, x = Head(mix, 3).double(), torch.randn(2, 5, 6, dtype=torch.float64)
        some, no = some_edges(5), torch.zeros(5, 5, dtype=torch.bool)

        def run(cut: Any, expected: Tensor) -> None:
            left = x.clone().requires_grad_()
            with cut:
                (got,) = torch.autograd.grad(model(left).square().sum(), left)
            near(got, expected, atol=1e-10)

        right = x.clone().requires_grad_()
        for cut, pair in ((ch.knockout, (some, no)), (ch.zero_weights, (no, some))):
            want = self.by_hand(model, right, *pair, right).square().sum()
            run(cut(model, some), torch.autograd.grad(want, right)[0])

    def test_a_sink_by_hand_keeps_its_share(self):
        torch.manual_seed(0)
        q, sink = torch.randn(2, 3, 5, 4), torch.randn(3, 1, 1)
        cut = some_edges(5)

        def mix(blocked: Tensor | None = None) -> Tensor:
            scores = q @ q.mT / 2
            if blocked is not None:
                scores = scores.masked_fill(blocked, -math.inf)
            logits = torch.cat([scores, sink.expand(2, 3, 5, 1)], -1)
            return logits.softmax(-1)[..., :-1] @ q

        with ch.knockout(mix, cut):
            near(mix(), mix(cut) if False else expected_with_sink(q, sink, cut))

    def test_softcap_bias_and_sinks_of_attend(self):
        torch.manual_seed(0)
        q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 2)
        bias, sinks, cut = torch.randn(6, 5, 7), torch.randn(6), some_edges(5, 7)
        options: dict[str, Any] = {"scale": 0.3, "softcap": 2.0, "bias": bias, "sinks": sinks}
        with ch.knockout(ch.attend, cut, heads=[1, 4]):
            got = ch.attend(q, k, v, **options)
        blocked = bias.clone()
        blocked[[1, 4]] = blocked[[1, 4]].masked_fill(cut, -math.inf)
        near(got, ch.attend(q, k, v, **{**options, "bias": blocked}))


def expected_with_sink(q: Tensor, sink: Tensor, cut: Tensor) -> Tensor:
    powers = (q.double() @ q.double().mT / 2).exp().masked_fill(cut, 0.0)
    return powers / (powers.sum(-1, keepdim=True) + sink.double().exp()) @ q.double()


DECODERS = ["Llama", "Mistral", "Qwen3-MoE", "Gemma 3", "GPT-2", "GPT-NeoX", "DeepSeek-V3", "OPT"]
EAGER = ["Llama", "Gemma 2", "GPT-OSS", "GPT-J", "GPT-2", "BERT", "GPT-Neo"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "sdpa") for name in [*DECODERS, "BERT"]), *((name, "eager") for name in EAGER)],
)
def test_all_layers_against_a_mask_given_to_the_model(name, backend):
    """A four-dimensional mask is what these models hand to their attention as it is."""
    pytest.importorskip("transformers")
    one = BY_NAME[name]
    model, inputs = one.make(backend), one.read()
    cut = some_edges()
    with ch.knockout(model, cut):
        got = first_of(model(**inputs))
    allowed = ~cut if one.family == "encoder" else ~cut & masks.causal().dense(LENGTH)
    if getattr(model.config, "layer_types", None) and "sliding_attention" in model.config.layer_types:
        assert model.config.sliding_window >= LENGTH
    blocked = torch.zeros(LENGTH, LENGTH).masked_fill(~allowed, torch.finfo(torch.float32).min)
    want = first_of(model(**inputs, attention_mask=blocked.expand(2, 1, -1, -1)))
    near(got, want, atol=1e-5)
    assert (got - first_of(model(**inputs))).abs().max() > 1e-3
