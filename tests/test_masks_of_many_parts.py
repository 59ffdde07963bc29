"""Masks of thousands of parts, and parts used again: each distinct part is asked once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead import masks, readings
from clearhead.masks import Mask
from clearhead.masks.positional import Relative

SIZE = 64


def shared(rounds: int) -> Mask:
    """A mask that is used twice in each round: 2 ** rounds leaves when written out."""
    mask = masks.causal()
    for i in range(rounds):
        mask = mask | (mask - masks.diagonal(i))
    return mask


def chain(parts: int) -> tuple[Mask, torch.Tensor]:
    """Causal without `parts` single edges, and the same by hand."""
    mask, want = masks.causal(), torch.ones(SIZE, SIZE).tril().bool()
    for n in range(parts):
        edge = (n * 7 % SIZE, n * 11 % SIZE)
        mask = mask - masks.edges([edge])
        want[edge] = False
    return mask, want


def calls(monkeypatch: pytest.MonkeyPatch, ask: Any) -> int:
    """How often leaves are asked for a tile."""
    count, own = [0], Relative._tile

    def counted(self: Any, *given: Any) -> Any:
        count[0] += 1
        return own(self, *given)

    monkeypatch.setattr(Relative, "_tile", counted)
    ask()
    return count[0]


def test_a_part_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty rounds more ask for twenty diagonals more; small composites may repeat a question."""
    asked = []
    for rounds in (20, 40):
        mask = shared(rounds)
        with monkeypatch.context() as patch:
            asked.append(calls(patch, lambda mask=mask: mask.dense(SIZE)))
    assert asked[1] - asked[0] == 20


@pytest.mark.parametrize("impl", ["reference", "tiled", "native"])
def test_a_mask_used_again_and_again_is_causal(impl: str) -> None:
    x = torch.randn(1, 1, SIZE, 16)
    read = (readings.Mass(shared(40)), readings.Entropy())
    mass = ch.attend(x, x, x, shared(40), read=read, impl=impl)[1][0]
    torch.testing.assert_close(mass, torch.ones(1, 1, SIZE))
    ours = ch.attend(x, x, x, shared(40), impl=impl)
    torch.testing.assert_close(ours, ch.attend(x, x, x, masks.causal(), impl="reference"))


def test_what_is_asked_of_a_mask_used_again() -> None:
    mask, plain = shared(40), masks.causal()
    assert mask == shared(40)
    assert hash(mask) == hash(shared(40))
    assert mask != shared(39)
    assert mask.count(SIZE) == plain.count(SIZE)
    assert mask.row(5, source=SIZE) == plain.row(5, source=SIZE)
    assert "may read" in str(mask.why(5, 3, source=SIZE))
    assert "may not read" in str(mask.why(3, 5, source=SIZE))
    assert len(repr(mask)) < 1000
    assert mask.block(range(3), range(9, 12), SIZE) in (masks.EMPTY, masks.PARTIAL)
    assert torch.equal(mask.to("cpu").dense(SIZE), plain.dense(SIZE))
    assert torch.equal((~mask).dense(SIZE), ~plain.dense(SIZE))


def test_thousands_of_parts() -> None:
    mask, want = chain(3000)
    assert torch.equal(mask.dense(SIZE), want)
    assert mask.count(SIZE) == int(want.sum())
    assert mask == chain(3000)[0]
    assert mask != chain(2999)[0]
    x = torch.randn(1, 1, SIZE, 8)
    torch.testing.assert_close(ch.attend(x, x, x, mask), ch.attend(x, x, x, want))
    with pytest.raises(ValueError, match="lies beyond the positions"):
        mask.dense(SIZE - 1)


def test_long_expressions_are_read_again() -> None:
    mask = masks.causal()
    for i in range(200):
        mask = mask - masks.diagonal(i)
    assert masks.parse(repr(mask)) == mask
    assert mask.count(300) == 100 * 101 // 2


def test_deep_around_a_function() -> None:
    mask = masks.where(lambda b, h, i, j: i >= j)
    for i in range(400):
        mask = mask - masks.diagonal(i + 1)
    with pytest.raises(ValueError, match=r"deep around where\(function\)"):
        mask.dense(8)
    flat, want = chain(400)
    both = flat & masks.where(lambda b, h, i, j: (i + j) % 2 == 0)
    rows = torch.arange(SIZE)
    assert torch.equal(both.dense(SIZE), want & ((rows[:, None] + rows) % 2 == 0))


@pytest.mark.parametrize("make", [lambda: chain(5000)[0], lambda: shared(40)])
def test_copies_of_many_parts(make: Any) -> None:
    """Neither the depth of a mask nor a part that is used again costs more than the parts."""
    mask = make()
    written = pickle.dumps(mask)
    assert len(written) < 2_000_000
    for again in (copy.deepcopy(mask), pickle.loads(written), copy.copy(mask)):
        assert again is not mask
        assert again == mask
        assert hash(again) == hash(mask)
        assert torch.equal(again.dense(SIZE), mask.dense(SIZE))


def test_copies_share_what_is_shared() -> None:
    """A part that two masks of a list have is one object afterwards, as before."""
    leaf = masks.document(torch.arange(SIZE) // 9)
    one, two = pickle.loads(pickle.dumps([leaf & masks.causal(), leaf - masks.first(1)]))
    assert one.left is two.left
    assert torch.equal(two.dense(SIZE), (leaf - masks.first(1)).dense(SIZE))


@pytest.mark.parametrize("impl", ["reference", "tiled", "native"])
def test_a_deep_union_is_read_as_ranges(impl: str) -> None:
    """A union of neighbouring and of distant diagonals, which one interval or several describe."""
    mask, distance = masks.diagonal(0), torch.arange(SIZE)[:, None] - torch.arange(SIZE)
    for n in range(600):
        mask = mask | masks.diagonal(n % 5 if n < 300 else n % 5 + 20)
    want = ((distance >= 0) & (distance < 5)) | ((distance >= 20) & (distance < 25))
    x = torch.randn(1, 1, SIZE, 8, generator=torch.Generator().manual_seed(0))
    weights = ch.attend(x, x, x, mask, read=readings.Weights(), impl=impl)[1]
    assert torch.equal(weights[0, 0] > 0, want)
