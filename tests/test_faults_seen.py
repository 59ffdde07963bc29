"""What reading a model must not get wrong: forms of attention, modes around it, true reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead import readings

WEIGHTS = readings.Weights()
einsum = torch.einsum


class Attention(nn.Module):
    """Handwritten attention over (batch, position, width), with heads, mixed by a function."""

    def __init__(self, mix: Any, heads: int = 2, width: int = 6):
        super().__init__()
        self.mix, self.heads = mix, heads
        self.qkv = nn.Linear(width, 3 * width)

    def split(self, x: Tensor) -> list[Tensor]:
        parts = self.qkv(x).chunk(3, -1)
        return [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in parts]

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(*self.split(x))


def watched(mix: Any, *, batch: int = 3, heads: int = 2, positions: int = 5, read: Any = WEIGHTS):
    """Watch one attention; give the records, and query, key and value."""
    torch.manual_seed(0)
    model, x = Attention(mix, heads), torch.randn(batch, positions, 6)
    with torch.no_grad(), ch.watch(model, read=read) as seen:
        model(x)
    return seen, *model.split(x)


def reason(mix: Any, **sizes: int) -> str:
    """Give the error of a watch that sees nothing."""
    with pytest.raises(RuntimeError, match="no attention call") as raised:
        watched(mix, **sizes)
    return str(raised.value)


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.detach(), rtol=0, atol=1e-6)


def soft(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1)


class TestFormsOfProducts:
    EINSUMS = (
        # One head of keys and values.
        ("bhqd,bkd->bhqk", "bhqk,bkd->bhqd"),
        ("bhqd,bkd->bqhk", "bqhk,bkd->bqhd"),
        ("bhqd,bkd->bhkq", "bhkq,bkd->dqbh"),
        # An ellipsis beside letters that an alphabet would give it.
        ("...aqz,...azk->...aqk", "...aqk,...azk->...aqz"),
        ("...qZ,...ZY->...qY", "...qY,...ZY->...qZ"),
        ("...yd,...dx->...xy", "...xy,...dx->...dy"),
    )

    @pytest.mark.parametrize(("scores", "context"), EINSUMS)
    def test_einsum(self, scores, context):
        axis = scores.partition("->")[2].replace("...", "").index(
            next(x for x in "kYx" if x in scores.partition("->")[2])
        ) - len(scores.partition("->")[2].replace("...", ""))  # fmt: skip

        def mix(q, k, v):
            if ",b" in scores:
                k, v = k[:, 0], v[:, 0]
            else:
                k, v = k.mT, v.mT
            return einsum(context, einsum(scores, q, k).softmax(axis), v)

        seen, q, k, _ = watched(mix)
        near(seen[0].value, soft(q, k[:, :1] if ",b" in scores else k))
        assert not seen.notes

    def test_einsum_that_leaves_the_queries_open_is_named(self):
        def mix(q, k, v):
            return einsum(
                "bhij,bjd->bhid", einsum("bhid,bjd->bhij", q, k[:, 0]).softmax(-1), v[:, 0]
            )

        assert "'bhij,bjd->bhid' leaves open which axis" in reason(mix, heads=3, positions=3)

    @pytest.mark.parametrize("arrow", ["", "->di", "->id"])
    def test_einsum_of_one_sequence(self, arrow):
        def mix(q, k, v):
            weights = einsum("id,jd->ij", q[0, 0], k[0, 0]).softmax(-1)
            return einsum("ij,jd" + arrow, weights, v[0, 0])

        seen, q, k, _ = watched(mix)
        near(seen[0].value, soft(q, k)[:1, :1])

    @pytest.mark.parametrize(
        ("equation", "why"),
        [
            ("bhqk,bhkd", "sums over b, h, k"),
            ("bhqk,bhkd->bqd", "sums over h, k"),
            ("bhqk,bhkd->bhqkd", "sums over no axis"),
            ("bhqk,bhde->bhqkde", "sums over no axis"),
        ],
    )
    def test_einsum_that_is_no_attention_says_why(self, equation, why):
        def mix(q, k, v):
            return einsum(equation, soft(q, k), v)

        assert f"its einsum {equation!r} {why}" in reason(mix)

    TURNED = (
        lambda q, k, v: (k @ q.mT).softmax(-2).mT @ v,
        lambda q, k, v: v.mT @ (k @ q.mT).softmax(-2),
        lambda q, k, v: v.mT @ soft(q, k).transpose(-1, -2),
        lambda q, k, v: torch.movedim(soft(q, k), 2, 3).swapaxes(2, 3) @ v,
        lambda q, k, v: einsum("bqhk,bhkd->bqhd", soft(q, k).transpose(1, 2), v),
        lambda q, k, v: einsum("kqbh,bhkd->bhqd", soft(q, k).permute(3, 2, 0, 1), v),
        lambda q, k, v: torch.linalg.matmul(torch.linalg.matmul(q, k.mT).softmax(-1), v),
    )

    @pytest.mark.parametrize("mix", TURNED)
    @pytest.mark.parametrize("positions", [2, 3, 5])
    def test_axes_of_one_size_are_told_apart(self, mix, positions):
        for batch, heads in ((3, 2), (positions, 2), (3, 3)):
            seen, q, k, _ = watched(mix, batch=batch, heads=heads, positions=positions)
            near(seen[0].value, soft(q, k))
            assert seen[0].check < 1e-5
            assert not seen.notes

    def test_dropout_of_turned_weights(self):
        def mix(q, k, v):
            return v.mT @ F.dropout(soft(q, k), 0.5).mT

        seen, q, k, _ = watched(mix)
        near(seen[0].value, soft(q, k))

    @pytest.mark.parametrize(
        "mix",
        [
            lambda q, k, v: (k @ q.mT).softmax(-1).mT @ v,
            lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
            lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1),
        ],
    )
    def test_softmax_over_the_queries_is_named(self, mix):
        assert "and its product with the value sums another one" in reason(mix, positions=3)


class Projection(nn.Linear):
    """A projection that changes its weight before it uses it."""

    def __init__(self, change: Any, how: str):
        super().__init__(8, 8, bias=False)
        self.change, self.how = change, how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.change(self.weight)
        return x @ weight.mT if self.how == "matmul" else einsum("oi,bti->bto", weight, x)


class TestKind:
    @pytest.mark.parametrize("how", ["matmul", "einsum"])
    @pytest.mark.parametrize(
        "change",
        [
            lambda w: w.double().float(),
            lambda w: w / w.norm(),
            lambda w: (w - w.mean(0)).clone().contiguous(),
            lambda w: w.to(torch.bfloat16).to(w.dtype).mT.mT,
            lambda w: w.abs().sign() * w,
        ],
    )
    def test_weights_that_are_changed_are_weights(self, change, how):
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.q, self.k = Projection(change, how), Projection(change, how)

            def forward(self, x, source):
                return soft(self.q(x), self.k(source)) @ source

        layer, x, other = Layer(), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
        with ch.watch(layer) as seen:
            layer(x, x)
        assert seen[0].kind == "self"
        with ch.watch(layer) as seen:
            layer(x, other)
        assert seen[0].kind == "cross"

    def test_learned_queries_are_activations(self):
        class Pool(nn.Module):
            def __init__(self):
                super().__init__()
                self.latents, self.q = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, 8)

            def forward(self, x):
                return soft(self.q(self.latents.double().float()), x) @ x

        model, x = Pool(), torch.randn(2, 5, 8)
        with ch.watch(model, read=WEIGHTS) as seen:
            model(x)
        near(seen[0].value[:, 0], soft(model.q(model.latents), x))
        assert seen[0].kind == "cross"


class TestScale:
    @staticmethod
    def of(score: Any, heads: int = 2, positions: int = 5) -> float | None:
        class Scored(Attention):
            def __init__(self):
                super().__init__(lambda q, k, v: score(self, q, k).softmax(-1) @ v, heads)
                self.bias = nn.Parameter(torch.randn(positions, positions))
                self.gain = nn.Parameter(torch.rand(heads, 1, 1) + 1)
                self.one = nn.Parameter(torch.tensor(3.0))

        model = Scored()
        with torch.no_grad(), ch.watch(model, read=WEIGHTS) as seen:
            model(torch.randn(1, positions, 6))
        return seen[0].scale

    @pytest.mark.parametrize(
        ("score", "scale"),
        [
            (lambda m, q, k: 0.25 * (q @ k.mT) + m.bias, 0.25),
            (lambda m, q, k: (q @ k.mT + m.bias) / 4, 0.25),
            (lambda m, q, k: (q / 2) @ k.mT * 0.5 + m.bias.double().float(), 0.25),
            (lambda m, q, k: torch.divide(q @ k.mT, 4) - m.bias, 0.25),
            (lambda m, q, k: q @ k.mT * m.one, 3.0),
            (lambda m, q, k: q @ k.mT / m.one.exp().log(), 1 / 3),
        ],
    )
    def test_one_number(self, score, scale):
        assert self.of(score) == pytest.approx(scale)
        assert self.of(score, heads=1, positions=1) == pytest.approx(scale)

    @pytest.mark.parametrize(
        "score",
        [
            lambda m, q, k: q @ k.mT * m.gain,
            lambda m, q, k: q @ k.mT * m.gain.exp(),
            lambda m, q, k: m.gain.detach().clone() * (q @ k.mT),
            lambda m, q, k: q @ k.mT / torch.tensor([2.0, 4.0])[:, None, None],
            lambda m, q, k: (q @ k.mT).mul(m.gain) * 0.5,
        ],
    )
    def test_no_one_number(self, score):
        assert self.of(score) is None
