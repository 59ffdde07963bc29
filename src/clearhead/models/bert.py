"""A small BERT: every position attends to all others, and predicts the tokens that are hidden.

Two things differ from `gpt.py`: there is no causal mask (only padding is masked), and the model
learns to fill in masked tokens instead of predicting the next one.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead import masks
from clearhead.attention import attend
from clearhead.models.checks import check_sizes, check_tokens
from clearhead.models.gpt import turn
from clearhead.models.text import Characters

__all__ = ["BERT", "hide"]

PAD, MASK = 0, 1
IGNORE = -100  # the ignore_index of cross_entropy: positions without a target


class BERTAttention(nn.Module):
    """Bidirectional multi-head attention; only padding is masked."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_layer = nn.Linear(width, width, bias=False)
        self.key_layer = nn.Linear(width, width, bias=False)
        self.value_layer = nn.Linear(width, width, bias=False)
        self.join = nn.Linear(width, width)

    def forward(
        self,
        x: Float[Tensor, "batch position width"],
        positions: Int[Tensor, " position"],
        mask: masks.Mask | None,
        read: Any,
    ) -> tuple[Float[Tensor, "batch position width"], Any]:
        query = turn(self.split(self.query_layer(x)), positions)
        key = turn(self.split(self.key_layer(x)), positions)
        value = self.split(self.value_layer(x))
        answer = attend(query, key, value, mask, read=read)
        context, seen = (answer, None) if read is None else answer
        return self.join(context.transpose(1, 2).flatten(2)), seen

    def split(self, x: Tensor) -> Float[Tensor, "batch head position head_dim"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class BERTBlock(nn.Module):
    """Attention, then a feed-forward network, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = BERTAttention(width, heads)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, positions: Tensor, mask: masks.Mask | None, read: Any
    ) -> tuple[Tensor, Any]:
        mixed, seen = self.attention(self.attention_norm(x), positions, mask, read)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feed(self.feed_norm(x))), seen


class BERT(nn.Module):
    """A bidirectional transformer that fills in hidden tokens.

    >>> model = BERT(vocabulary=50, layers=2, heads=2, width=32, length=16)
    >>> tokens = torch.randint(2, 50, (2, 7))
    >>> tuple(model(tokens, mask=masks.lengths([7, 4])).shape)
    (2, 7, 50)

    Token 0 is padding and token 1 is [MASK]. `mask` says which positions are real, for example
    `masks.lengths(...)` or `masks.keep(tokens != 0)`. Other arguments as in `GPT`.
    """

    name = "bert"
    special = ("[PAD]", "[MASK]")

    def __init__(
        self,
        vocabulary: Characters | int,
        *,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        length: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.config: dict[str, Any] = dict(
            layers=layers, heads=heads, width=width, length=length, dropout=dropout
        )
        self.length = length
        self.size = check_sizes(vocabulary, **self.config)
        self.embedding = nn.Embedding(self.size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(BERTBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.size, bias=False)
        self.apply(_small_weights)

    def forward(
        self,
        tokens: Int[Tensor, "batch position"],
        *,
        mask: masks.Mask | None = None,
        read: Any = None,
    ) -> Any:
        """Return the logits of the token at every position."""
        check_tokens(tokens, self.length)
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        x = self.dropout(self.embedding(tokens))

        seen = []
        for block in self.blocks:
            x, value = block(x, positions, mask, read)
            seen.append(value)

        logits = self.head(self.norm(x))
        return logits if read is None else (logits, seen)

    def task(self, windows: Int[Tensor, "batch length+1"], generator: torch.Generator):
        """Make one training batch (tokens, targets, mask): texts of many lengths, tokens hidden."""
        tokens = windows[:, :-1]
        batch, position = tokens.shape
        # Short texts are padded, so that the model learns short ones too.
        lengths = torch.randint(1, position + 1, (batch,), generator=generator)
        real = torch.arange(position) < lengths[:, None]
        tokens = tokens.where(real, torch.tensor(PAD))
        hidden, targets = hide(tokens, real, self.size, generator)
        return hidden, targets, masks.keep(real)


def hide(
    tokens: Int[Tensor, "batch position"], real: Tensor, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Hide 15% of the real tokens (Devlin et al. 2018); return the inputs and the targets.

    Of those, 80% become [MASK], 10% a random token and 10% stay, so that the model cannot trust
    its input. Targets are -100 at all other positions.
    """
    asked = (torch.rand(tokens.shape, generator=generator) < 0.15) & real
    asked[0, 0] |= ~asked.any()  # a loss needs at least one target
    chance = torch.rand(tokens.shape, generator=generator)
    noise = torch.randint(len(BERT.special), size, tokens.shape, generator=generator)
    shown = tokens.where(~(asked & (chance < 0.8)), torch.tensor(MASK))
    shown = shown.where(~(asked & (chance >= 0.9)), noise)
    return shown, tokens.where(asked, torch.tensor(IGNORE))


def _small_weights(module: nn.Module) -> None:
    # Small weights make the first prediction uniform: the loss starts near log(vocabulary).
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
