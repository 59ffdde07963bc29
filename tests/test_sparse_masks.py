"""Masks of few edges between many positions: work in proportion to the edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import masks, readings
from clearhead._core import Sizes
from clearhead.attention.impl.native.call import Inputs, sparse
from clearhead.attention.impl.tiled import strips
from clearhead.attention.problem import Problem
from clearhead.masks import Mask
from tests import oracle

SIZE = 2311
READ = (readings.TopK(3), readings.Entropy(), readings.Received(), readings.Mass(masks.first(4)))


def random_edges(size: int, each: int) -> Tensor:
    draw = torch.Generator().manual_seed(each)
    sources = torch.randint(0, size, (size * each,), generator=draw)
    return torch.stack([torch.arange(size).repeat_interleave(each), sources], -1)


def shuffled(size: int, each: int) -> Tensor:
    draw = torch.Generator().manual_seed(each)
    return (torch.arange(size) // each)[torch.randperm(size, generator=draw)]


def by_hand(pairs: Tensor, size: int) -> Tensor:
    edges = torch.zeros(size, size, dtype=torch.bool)
    edges[pairs[:, 0], pairs[:, 1]] = True
    return edges


def cases(size: int) -> dict[str, tuple[Mask, Tensor]]:
    pairs, ids = random_edges(size, 5), shuffled(size, 7)
    edges, same = by_hand(pairs, size), ids[:, None] == ids
    past = torch.ones(size, size, dtype=torch.bool).tril()
    after = torch.zeros_like(same)
    after[:, 1:] = same[:, :-1]
    return {
        "edges": (masks.edges(pairs), edges),
        "both": (masks.edges(pairs) & masks.causal(), edges & past),
        "either": (masks.edges(pairs) | masks.diagonal(0), edges | torch.eye(size).bool()),
        "documents": (masks.document(ids) & masks.causal(), same & past),
        "without": (masks.document(ids) - masks.edges(pairs), same & ~edges),
        "function": (masks.document(ids) & masks.where(lambda b, h, i, j: j <= i), same & past),
        "induction": (masks.induction(ids), after & past),
    }


NAMES = sorted(cases(64))


def left(problem: Problem) -> bool:
    """Whether the kernel leaves a call to the fallback."""
    return Inputs(problem).ranges is None and sparse(problem)


def problem(mask: Mask, size: int, dtype: Any = torch.float32) -> Problem:
    x = torch.zeros(1, 1, size, 4, dtype=dtype)
    return Problem(x, x, x, mask, 1.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("impl", ["native", "tiled"])
def test_context_and_readings_are_right(name: str, impl: str) -> None:
    mask, allowed = cases(SIZE)[name]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, SIZE, 4)
    context, (top, entropy, received, mass) = ch.attend(q, k, v, mask, read=READ, impl=impl)
    want = oracle.attend(q, k, v, allowed)
    weights = torch.from_numpy(want.weights)
    near = {"rtol": 0, "atol": 2e-6}  # a few roundings of numbers up to 1 (8 for scores)
    torch.testing.assert_close(context.double(), torch.from_numpy(want.context), **near)
    torch.testing.assert_close(top.weights.double(), weights.topk(3).values, **near)
    found = weights.gather(-1, top.sources.clamp(min=0)) * (top.sources >= 0)
    torch.testing.assert_close(top.weights.double(), found, **near)
    plain = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    torch.testing.assert_close(entropy.double(), plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(received.double(), weights.sum(-2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mass.double(), weights[..., :4].sum(-1), **near)


@pytest.mark.parametrize("impl", ["native", "tiled"])
def test_gradients_are_right(impl: str) -> None:
    mask, allowed = cases(SIZE)["both"]
    torch.manual_seed(1)
    inputs = [x.requires_grad_() for x in torch.randn(3, 1, 1, SIZE, 4)]
    outer = torch.randn(1, 1, SIZE, 4)
    q, k, v = inputs
    found = torch.autograd.grad(ch.attend(q, k, v, mask, impl=impl), inputs, outer)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v = exact
    scores = (q @ k.mT / 2).masked_fill(~allowed, -torch.inf)
    empty = ~allowed.any(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    want = torch.autograd.grad(weights @ v, exact, outer.double())
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_only_listed_sources_are_computed(name: str) -> None:
    """Edges that are computed, for twice the positions: twice as many, not four times."""
    computed = []
    for size in (SIZE, 2 * SIZE):
        mask, allowed = cases(size)[name]
        pieces = strips.plan(problem(mask, size), 16)
        computed.append(sum(16 * piece.width for piece in pieces))
        # Each source that a strip has is there for at least one of its rows, or for the mask that
        # the other one is taken from.
        assert computed[-1] <= 16 * 3 * max(int(allowed.sum()), 7 * size)
    assert computed[1] <= 2.2 * computed[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_leaves_them_to_the_fallback(name: str) -> None:
    assert left(problem(cases(2 * SIZE)[name][0], 2 * SIZE))


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.window(3) | masks.first(2),
        masks.where(lambda b, h, i, j: j <= i),
        ~masks.edges([(5, 3)]),
        masks.edges(random_edges(SIZE, 900)),
        masks.document(torch.arange(SIZE) % 2),
    ],
    ids=repr,
)
def test_other_masks_stay_with_the_kernel(mask: Mask) -> None:
    assert not left(problem(mask, SIZE))


def test_a_tile_of_listed_edges_is_written_not_tested() -> None:
    pairs = random_edges(SIZE, 5)
    mask = masks.edges(pairs)
    asked = []
    mask._at = lambda *given: asked.append(given)  # type: ignore[method-assign]
    assert torch.equal(mask.dense(SIZE, SIZE), by_hand(pairs, SIZE))
    assert not asked


def test_a_stored_mask_answers_for_some_queries() -> None:
    stored = torch.ones(4, 6, dtype=torch.bool).triu()
    keep = torch.tensor([True, True, True, True, False, False])
    mask, sizes = ~(masks.keep(keep) & masks.dense(stored)), Sizes(1, 1, 4, 6)
    for first in range(4):
        listed = masks.dense(stored).sources(range(first, first + 1), sizes)
        assert listed is not None
        assert listed.tolist() == list(range(first, 6))
        found = mask.sources(range(first, first + 1), sizes)
        allowed = (~(keep & stored))[first].nonzero().flatten()
        assert found is None or torch.isin(allowed, found).all()
