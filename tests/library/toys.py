"""A library of small classes for sweeps: a sound one, one that leaks, and ones that misbehave."""

from __future__ import annotations

import ctypes
import os
import time
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VOCAB, LENGTH = 31, 12


class Toy(NamedTuple):
    name: str
    mapping: str = "causal"
    model_type: str = "toy"


class BuiltToy(NamedTuple):
    model: nn.Module
    inputs: dict[str, Any]
    stream: str = "input_ids"
    vocabulary: int = VOCAB


class Sound(nn.Module):
    """One layer of causal attention that respects its padding mask and its documents."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCAB, 8), nn.Linear(8, 24)
        self.head = nn.Linear(8, VOCAB)

    def allowed(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        allowed = self.allowed(input_ids.shape[1]).expand(len(x), -1, -1)
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None]
        if position_ids is not None:
            document = (position_ids == 0).cumsum(-1)
            allowed = allowed & (document[:, None] == document[:, :, None])
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(~allowed, -torch.inf)
        return {"logits": self.head(x + scores.softmax(-1).nan_to_num() @ v)}


class Leaking(Sound):
    """Reads one token of the future."""

    def allowed(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril(1)


class Packing(Sound):
    """Takes its documents for positions alone, and no padding mask."""

    def forward(self, input_ids: Tensor, *, position_ids: Any = None) -> Any:  # type: ignore[override]
        return super().forward(input_ids)


class Ending(Sound):
    """Ends its process in train mode."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        if self.training:
            os._exit(7)
        return super().forward(*args, **kwargs)


class Faulting(Sound):
    """Reads the address 0."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        ctypes.string_at(0)
        return {}


class Hanging(Sound):
    """Comes to no end with position ids."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if position_ids is not None:
            time.sleep(1000)
        return super().forward(input_ids, attention_mask)


class Greedy(Sound):
    """Takes a terabyte."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        torch.ones(1 << 38)
        return super().forward(*args, **kwargs)


class Painting(Sound):
    """Prints and warns in colours, and clears the screen."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        print("\x1b[2J\x1b[31mred\x1b[0m \x07bell \u202eturned")
        warnings.warn("\x1b]0;title\x07 of a window", stacklevel=1)
        return super().forward(*args, **kwargs)


class Exiting(Sound):
    """Calls sys.exit."""

    def __init__(self) -> None:
        super().__init__()
        raise SystemExit(3)


class Masked(Sound):
    """Reads both sides."""

    def allowed(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool)


CAUSAL = (
    Ending, Exiting, Faulting, Greedy, Hanging, Leaking, Packing, Painting, Sound,
)  # fmt: skip


def catalogue() -> tuple[Toy, ...]:
    causal = [Toy(one.__name__) for one in CAUSAL]
    return (*causal, Toy("Masked", "masked"))


def build(subject: Toy, backend: str = "eager", *, seed: int = 0) -> BuiltToy:
    torch.manual_seed(seed)
    model = globals()[subject.name]().eval()
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return BuiltToy(model, {"input_ids": ids})
