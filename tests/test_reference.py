"""The derivatives of the reference are right to any order, in every mode."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import clearhead as ch
from clearhead import masks, readings
from clearhead._core.sizes import Sizes
from clearhead.attention.impl import dropout
from tests import oracle
from tests.cases import BY_NAME

attend = functools.partial(ch.attend, impl="reference")
TENSORS = ("query", "key", "value", "bias", "sinks")
SMALL = ("grouped", "fewer sources", "softcap", "sinks of empty rows", "bias blocks")


def small(name: str) -> dict[str, Any]:
    """Return the case's inputs in float64, cut to few sizes: gradcheck asks once a number."""
    given = BY_NAME[name].inputs(torch.float64)
    given["query"] = given["query"][:1, :2, -5:]
    given["key"], given["value"] = (given[n][:1, :2, :4] for n in ("key", "value"))
    if "bias" in given:
        given["bias"] = given["bias"][:2, -5:, :4]
    if "sinks" in given:
        given["sinks"] = given["sinks"][:2]
    return given


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("reading", [None, readings.LogSumExp(), readings.Entropy()], ids=str)
def test_gradients_of_every_order(name: str, reading: readings.Reading | None) -> None:
    given = small(name)
    leaves = [n for n in TENSORS if n in given]

    def function(*tensors: Tensor) -> Any:
        answer = attend(**dict(given, **dict(zip(leaves, tensors, strict=True))), read=reading)
        if reading is None:
            return answer
        # The log-sum-exp of an empty row is -inf, which has no difference quotient.
        return answer[1].nan_to_num(neginf=0.0)

    inputs = tuple(given[n].clone().requires_grad_() for n in leaves)
    if "bias" in given:
        # -inf has no difference quotient either; blocked edges are given by the mask here.
        blocked = given["bias"] == -torch.inf
        given["mask"] = ~blocked.clone()
        inputs = tuple(
            x if n != "bias" else torch.where(blocked, 0.0, given["bias"]).requires_grad_()
            for n, x in zip(leaves, inputs, strict=True)
        )
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("size", [1, 31, 33, 127, 129])
def test_gradients_at_odd_lengths(size: int) -> None:
    x = torch.randn(1, 1, size, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(size, size, dtype=torch.float64, requires_grad=True)
    context = attend(x, x, x, masks.causal(), bias=bias)
    weights = (x @ x.mT / 3**0.5 + bias).masked_fill(~masks.causal().dense(size), -torch.inf)
    right = weights.softmax(-1) @ x
    for ours, naive in zip(
        torch.autograd.grad(context.square().sum(), (x, bias)),
        torch.autograd.grad(right.square().sum(), (x, bias)),
        strict=True,
    ):
        torch.testing.assert_close(ours, naive)


def test_a_subset_of_gradients() -> None:
    for wanted in TENSORS:
        given = BY_NAME["all features"].inputs(torch.float64)
        given[wanted].requires_grad_()
        attend(**given).sum().backward()
        assert given[wanted].grad is not None
        assert torch.isfinite(given[wanted].grad).all()
        assert all(given[n].grad is None for n in TENSORS if n != wanted)


def test_half_precision_gradients_are_those_of_float32_rounded() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        low = BY_NAME["window"].inputs(dtype)
        high: dict[str, Any] = {
            n: x.float() if isinstance(x, Tensor) else x for n, x in low.items()
        }
        grads = []
        for call in (low, high):
            leaves = [call[n].requires_grad_() for n in ("query", "key", "value")]
            context = attend(**call)
            grads.append(torch.autograd.grad(context.float().sum(), leaves))
        for ours, right in zip(*grads, strict=True):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.float(), right.to(dtype).float())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_call_agrees_with_the_oracle(data: st.DataObject) -> None:
    size = functools.partial(st.integers, max_value=9)
    group, source_head = data.draw(size(1)), data.draw(st.integers(1, 2))
    query, source, width, value_width = (data.draw(size(0)) for _ in range(4))
    seed = data.draw(st.integers(0, 2**32))
    torch.manual_seed(seed)
    q = torch.randn(2, group * source_head, query, width, dtype=torch.float64)
    k = torch.randn(2, source_head, source, width, dtype=torch.float64)
    v = torch.randn(2, source_head, source, value_width, dtype=torch.float64)
    shape = data.draw(
        st.sampled_from([(query, source), (1, source), (2, 1, query, source), (source,)])
    )
    allowed = torch.rand(shape) < data.draw(st.sampled_from([0.0, 0.3, 0.9]))
    bias = torch.randn(shape, dtype=torch.float64) if data.draw(st.booleans()) else None
    more: dict[str, Any] = {"bias": bias, "scale": data.draw(st.sampled_from([None, 0.0, -1.5]))}
    more["softcap"] = data.draw(st.sampled_from([None, 0.7]))
    context, weights = attend(q, k, v, allowed, **more, read=readings.Weights())
    right = oracle.attend(q, k, v, allowed, **more)
    assert oracle.error(context, right.context) < 1e-12
    assert oracle.error(weights, right.weights) < 1e-12


class TestDropout:
    def keep(self, seed: int, p: float, rows: Tensor, columns: Tensor) -> Tensor:
        sizes = Sizes(2, 3, 31, 37)
        return dropout.keep(torch.tensor(seed), p, (2, 3), rows, columns, sizes)

    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 2**63 - 1), st.floats(0, 1), st.integers(0, 30), st.integers(0, 36))
    def test_a_tile_is_a_part_of_the_whole(self, seed: int, p: float, i: int, j: int) -> None:
        whole = self.keep(seed, p, torch.arange(31), torch.arange(37))
        tile = self.keep(seed, p, torch.arange(i, 31), torch.arange(j, 37))
        assert torch.equal(whole[..., i:, j:], tile)

    def test_the_hash_is_splitmix64(self) -> None:
        # The generator's published outputs for seed 1234567; edge n gives the n-th of them.
        published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
        at = [f / 2**64 for f in published]
        for edge, share in enumerate(at, start=1):
            for p, kept in ((share - 1e-9, True), (share + 1e-9, False)):
                one = dropout.keep(
                    torch.tensor(1234567), p, (1, 1), torch.tensor([0]), torch.tensor([edge]),
                    Sizes(1, 1, 1, 37),
                )  # fmt: skip
                assert one.item() is kept

    def test_0_keeps_all_and_1_none(self) -> None:
        rows, columns = torch.arange(31), torch.arange(37)
        assert self.keep(1, 0.0, rows, columns).all()
        assert not self.keep(1, 1.0, rows, columns).any()

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_the_share_in_many_seeds(self, p: float) -> None:
        rows, columns = torch.arange(31), torch.arange(37)
        kept = torch.stack([self.keep(seed, p, rows, columns) for seed in range(40)]).double()
        # 275 280 draws: four standard deviations.
        assert abs(kept.mean().item() - (1 - p)) < 4 * (p * (1 - p) / kept.numel()) ** 0.5
        for axis in range(1, 5):
            means = kept.mean(tuple(a for a in range(5) if a != axis))
            count = kept.numel() / means.numel()
            assert (means - (1 - p)).abs().max() < 5 * (p * (1 - p) / count) ** 0.5
