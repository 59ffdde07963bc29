"""Layers and a whole training step, beside the same with torch's attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from cases import flops
from clearhead import masks
from clearhead.models import GPT, gpt
from clearhead.models.train import Settings, Training
from measure import Goal, Row


def multihead(size: int = 1024, width: int = 768, head: int = 12) -> Iterator[Row]:
    """`MultiheadAttention` beside torch's, with and without weights."""
    theirs = torch.nn.MultiheadAttention(width, head, batch_first=True)
    ours = ch.MultiheadAttention(width, head, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    for layer in (ours, theirs):
        layer.eval().requires_grad_(False)  # torch has a fast path for this
    x = torch.randn(1, size, width)
    for name, asked in (("without", False), ("with", True)):
        yield Row(
            f"MultiheadAttention {name} weights (1, {size}, {width})",
            {
                "ours": partial(ours, x, x, x, need_weights=asked),
                "nn.MultiheadAttention": partial(theirs, x, x, x, need_weights=asked),
            },
            peer="nn.MultiheadAttention", compare=1 + asked,
        )  # fmt: skip


def on_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Any, *, read: Any = None) -> Tensor:
    """The model's attention call, by torch."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def nothing(query: Tensor, key: Tensor, value: Tensor, mask: Any, *, read: Any = None) -> Tensor:
    """No attention: the time of the step without it."""
    return query + key + value


def training(**sizes: int) -> Iterator[Row]:
    """A training step of the GPT (of its default size unless given); only attention differs."""
    model = GPT(65, **sizes)
    tokens = torch.randint(65, (Settings().batch, model.length + 1))
    calls = {"ours": ch.attend, "on SDPA": on_sdpa, "no attention": nothing}
    steps = {name: _step(copy.deepcopy(model), call, tokens) for name, call in calls.items()}
    head = model.blocks[0].attention.heads
    shape = (len(tokens), head, model.length, model.embedding.embedding_dim // head)
    yield Row(
        f"training step of models.GPT, {tuple(tokens[:, 1:].shape)} tokens",
        {name: steps[name] for name in ("ours", "on SDPA")},
        yardsticks={"no attention": steps["no attention"]},
        # Forward and backward have seven products; both compute the weights.
        flops=flops(shape, masks.causal(), 7) * len(model.blocks), each=7 * shape[3] // 2,
        floor="no attention", peer="on SDPA", goals=(Goal("on SDPA", 1.15),), compare=2,
    )  # fmt: skip


def _step(model: GPT, call: Callable[..., Any], tokens: Tensor) -> Callable[[], Any]:
    """One step after another; step n drops the same values in every copy of the model."""
    training = Training(model, lambda _: model.task(tokens, torch.Generator()), Settings())

    def step() -> tuple[Tensor, Tensor | None]:
        with patch.object(gpt, "attend", call):
            loss = training.advance().loss
        return torch.tensor(loss), model.embedding.weight.grad

    return step
