"""A mask tensor that is edited after the call changes no gradient: torch's own error, or none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import masks, readings

IMPLEMENTATIONS = ("reference", "native", "tiled")
SIZE, WIDTH = 7, 8


def band() -> Tensor:
    return torch.ones(SIZE, SIZE).tril().triu(-2).bool()


def from_mass(q: Tensor, m: Tensor, impl: str) -> Tensor:
    return ch.attend(q, q, q, read=readings.Mass(masks.causal() & masks.dense(m)), impl=impl)[1]


class Rule:
    """Edges that an object holds, as a method and as a callable."""

    def __init__(self, m: Tensor) -> None:
        self.allow = m

    def answer(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return self.allow[i, j]

    __call__ = answer


def both(*functions: Any) -> Any:
    return lambda b, h, i, j: functions[0](b, h, i, j) & functions[1](b, h, i, j)


def reads(m: Tensor) -> Any:
    return lambda b, h, i, j: m[i, j]


def partial_rule(m: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
    return m[i, j]


# What a function of edges reads besides its arguments.
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "closure": reads,
    "functions in a closure": lambda m: both(reads(m), lambda b, h, i, j: i >= j),
    "default": lambda m: lambda b, h, i, j, m=m: m[i, j],
    "partial": lambda m: functools.partial(partial_rule, m),
    "attribute of a closure": lambda m: (lambda rule: lambda b, h, i, j: rule.allow[i, j])(Rule(m)),
    "method": lambda m: Rule(m).answer,
    "callable": Rule,
    "dict": lambda m: (lambda held: lambda b, h, i, j: held["m"][i, j])({"m": m}),
}


def in_function(make: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor, str], Any]:
    return lambda q, m, impl: ch.attend(q, q, q, masks.where(make(m)), impl=impl)


CALLS: dict[str, Callable[[Tensor, Tensor, str], Any]] = {
    "tensor": lambda q, m, impl: ch.attend(q, q, q, m, impl=impl),
    "dense": lambda q, m, impl: ch.attend(q, q, q, masks.dense(m), impl=impl),
    "from_sdpa": lambda q, m, impl: ch.attend(q, q, q, masks.from_sdpa(m), impl=impl),
    "composed": lambda q, m, impl: ch.attend(q, q, q, ~masks.dense(~m) & masks.dense(m), impl=impl),
    "not": lambda q, m, impl: ch.attend(q, q, q, ~masks.dense(m), impl=impl),
    "a row": lambda q, m, impl: ch.attend(q, q, q, m[:1], impl=impl),
    "mass": from_mass,
    **{name: in_function(make) for name, make in FUNCTIONS.items()},
}


def gradient(call: Any, impl: str, edit: bool, dtype: torch.dtype) -> Tensor | None:
    """The gradient of a call whose mask is overwritten before the backward pass."""
    q = torch.arange(2 * SIZE * WIDTH, dtype=dtype).sin().view(1, 2, SIZE, WIDTH).requires_grad_()
    mask = band()
    loss = call(q, mask, impl).pow(2).sum()
    if edit:
        mask.logical_not_()
    try:
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None
    return q.grad


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CALLS)
def test_an_edit_changes_no_gradient(name: str, impl: str) -> None:
    dtype = torch.float32 if impl == "native" else torch.float64
    edited = gradient(CALLS[name], impl, True, dtype)
    kept = gradient(CALLS[name], impl, False, dtype)
    assert kept is not None
    assert edited is None or torch.equal(edited, kept)


@pytest.mark.parametrize("how", ["mask", "attn_mask"])
def test_an_edit_changes_no_gradient_of_a_layer(how: str) -> None:
    torch.manual_seed(0)
    layer = ch.MultiheadAttention(WIDTH, 2, batch_first=True)

    def call(q: Tensor, m: Tensor, impl: str) -> Tensor:
        given = {"mask": m} if how == "mask" else {"attn_mask": ~m}
        return layer(q[0], q[0], q[0], need_weights=False, **given)[0]

    edited = gradient(call, "", True, torch.float32)
    kept = gradient(call, "", False, torch.float32)
    assert kept is not None
    assert edited is None or torch.equal(edited, kept)


@pytest.mark.parametrize("make", [masks.keep, masks.document, masks.lengths, masks.duplicate])
def test_masks_of_data_hold_copies(make: Any) -> None:
    data = torch.tensor([True, True, False]) if make is masks.keep else torch.tensor([1, 1, 2])
    mask = make(data)
    before = mask.dense(3).clone()
    data.logical_not_() if make is masks.keep else data.fill_(3)
    assert torch.equal(mask.dense(3), before)


def test_a_mask_of_inference_mode_serves_in_training() -> None:
    with torch.inference_mode():
        mask = band()
    q = torch.ones(1, 1, SIZE, WIDTH, requires_grad=True)
    for impl in IMPLEMENTATIONS[1:]:
        ch.attend(q, q, q, mask, impl=impl).sum().backward()


class Counts(torch.nn.Module):
    """Changes a buffer beside the one that its mask reads."""

    allow: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("allow", band())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, q: Tensor) -> Tensor:
        context = ch.attend(q, q, q, masks.where(lambda b, h, i, j: self.allow[i, j]))
        self.calls += 1
        return context


def test_what_a_function_does_not_read_may_change() -> None:
    q = torch.randn(1, 2, SIZE, WIDTH, requires_grad=True)
    Counts()(q).sum().backward()
    assert q.grad is not None
