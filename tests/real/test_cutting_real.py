"""Cutting the induction heads of a real model: its second copy of a text becomes a surprise."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional as F

import clearhead as ch
from clearhead import masks

MODELS = Path(os.environ.get("CLEARHEAD_MODELS", ".cache/models"))
if not (MODELS / "smollm2" / "config.json").exists():
    pytest.skip(f"no models in {MODELS}: run `make real`", allow_module_level=True)


INDUCTION = [(18, 6), (17, 3), (17, 4), (18, 7), (17, 5), (23, 2), (23, 7), (20, 6)]
# As many of the same layers, the nearest numbers that are not among those.
OTHERS = [(18, 0), (17, 0), (17, 1), (18, 1), (17, 2), (23, 0), (23, 1), (20, 0)]
CUTS = {
    "ablate": lambda model, heads, tokens: ch.ablate(model, heads),
    "knockout": lambda model, heads, tokens: ch.knockout(model, masks.everything(), heads=heads),
}


@pytest.fixture(scope="module")
def smollm2():
    return transformers.AutoModelForCausalLM.from_pretrained(MODELS / "smollm2").eval()


def twice(seed: int) -> torch.Tensor:
    some = torch.Generator().manual_seed(seed)
    return torch.randint(3, 49000, (1, 64), generator=some).repeat(1, 2)


def losses(model, tokens: torch.Tensor) -> tuple[float, float]:
    """The loss on the first copy, and on the second."""
    each = F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
    return each[:63].mean().item(), each[64:].mean().item()


@torch.no_grad()
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cutting_induction_heads(smollm2, seed):
    tokens = twice(seed)
    first, second = losses(smollm2, tokens)
    print(f"\nseed {seed}: no cut {first:.2f} {second:.2f}")
    assert 1.5 < second < 3.6
    for name, cut in CUTS.items():
        with cut(smollm2, INDUCTION, tokens):
            without = losses(smollm2, tokens)
        with cut(smollm2, OTHERS, tokens):
            other = losses(smollm2, tokens)
        print(f"{name}: induction heads {without[0]:.2f} {without[1]:.2f}, others {other[1]:.2f}")
        assert without[1] > 10
        assert abs(without[0] - first) < 0.2
        assert abs(other[1] - second) < 1.2
    assert losses(smollm2, tokens) == (first, second)


@torch.no_grad()
def test_cutting_their_induction_edges_alone(smollm2):
    tokens = twice(0)
    first, second = losses(smollm2, tokens)
    with ch.knockout(smollm2, masks.induction(tokens[0]), heads=INDUCTION):
        without = losses(smollm2, tokens)
    print(f"\ninduction edges: {without[0]:.2f} {without[1]:.2f}")
    assert without[0] == first
    assert without[1] > second + 5


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_zeroing_a_head_is_zeroing_its_columns(smollm2, backend):
    tokens = twice(0)
    smollm2.set_attn_implementation(backend)
    with ch.ablate(smollm2, [(17, 3), (23, 8)]):
        got = smollm2(tokens).logits
    edited = copy.deepcopy(smollm2)
    for layer, head in ((17, 3), (23, 8)):
        edited.model.layers[layer].self_attn.o_proj.weight[:, 64 * head : 64 * head + 64] = 0
    want = edited(tokens).logits
    smollm2.set_attn_implementation("sdpa")
    print(f"\n{backend}: largest difference {(got - want).abs().max():.2g}")
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


@torch.no_grad()
def test_heads_by_effect(smollm2):
    """Of all heads of these layers the ones known for induction matter most to the second copy."""
    tokens = twice(0)

    def second(output):
        each = F.cross_entropy(output.logits[0, :-1], tokens[0, 1:], reduction="none")
        return each[64:].mean()

    table = ch.effects(
        smollm2, tokens, heads=[(17, head) for head in range(9)], metric=second, batch=4,
        edges=masks.induction(tokens[0]),
    )  # fmt: skip
    print(f"\n{table}")
    best = sorted(table, key=lambda row: -row.effect)[:3]
    assert {row.cut for row in best} == {(17, 3), (17, 4), (17, 5)}
