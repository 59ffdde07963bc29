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
