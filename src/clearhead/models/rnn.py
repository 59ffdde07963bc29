"""A small recurrent network (GRU): the contrast to attention.

One state is carried through the sequence and updated at every step. Information from an early token
has to survive all of these steps; in `gpt.py` a later position reads it directly.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.models.checks import check_sizes, check_tokens
from clearhead.models.text import Characters

__all__ = ["RNN"]


class RNN(nn.Module):
    """A GRU (Cho et al. 2014) that predicts the next token.

    >>> model = RNN(vocabulary=50, layers=1, width=32)
    >>> tuple(model(torch.randint(50, (3, 7))).shape)
    (3, 7, 50)

    At each step a gate z chooses how much of the old state h stays: h' = (1 - z) * new + z * h.
    It reads sequences of any length; `length` is the length of the training windows.
    """

    name = "rnn"
    special = ()

    def __init__(
        self,
        vocabulary: Characters | int,
        *,
        layers: int = 2,
        width: int = 256,
        length: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.config: dict[str, Any] = dict(
            layers=layers, width=width, length=length, dropout=dropout
        )
        self.length = length
        size = check_sizes(vocabulary, **self.config)
        self.embedding = nn.Embedding(size, width)
        # torch applies dropout between layers, and warns where there is only one.
        between = dropout if layers > 1 else 0.0
        self.recurrent = nn.GRU(width, width, layers, batch_first=True, dropout=between)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, size, bias=False)
        # A small head makes the first prediction uniform: the loss starts near log(vocabulary).
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(
        self, tokens: Int[Tensor, "batch position"], *, cache: dict[str, Tensor] | None = None
    ) -> Float[Tensor, "batch position token"]:
        """Return the logits of the next token at every position.

        `cache` (from `new_cache`) holds the state after the positions before `tokens`.
        """
        check_tokens(tokens)
        state = cache.get("state") if cache is not None else None
        x, state = self.recurrent(self.dropout(self.embedding(tokens)), state)
        if cache is not None:
            cache["state"] = state
        return self.head(self.dropout(x))

    def new_cache(self) -> dict[str, Tensor]:
        """Return an empty cache: the state has one size, however long the text."""
        return {}

    def task(self, windows: Int[Tensor, "batch length+1"], generator: torch.Generator):
        """Make one training batch (tokens, targets, mask): at each position, the next token."""
        return windows[:, :-1], windows[:, 1:], None
