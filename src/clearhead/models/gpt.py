"""A small GPT: every position attends to those before it, and predicts the next token.

    tokens -> embedding -> blocks of (attention, feed-forward) -> norm -> logits

Read from top to bottom: rotary positions, one attention layer, one block, the model.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead import masks
from clearhead.attention import attend
from clearhead.models.checks import check_sizes, check_tokens
from clearhead.models.text import Characters

__all__ = ["GPT", "turn"]


def turn(
    x: Float[Tensor, "*batch position head_dim"], positions: Int[Tensor, " position"]
) -> Float[Tensor, "*batch position head_dim"]:
    """Turn pairs of features by an angle that grows with the position (RoPE, Su et al. 2021).

    >>> x = torch.ones(1, 4)
    >>> at = lambda position: turn(x, torch.tensor([position]))
    >>> torch.allclose(at(7) @ at(5).T, at(3) @ at(1).T)
    True

    So the dot product of a query and a key depends on their contents and on the distance between
    them: "the token before me" is one pattern, wherever in the text it happens.
    """
    half = x.shape[-1] // 2
    speeds = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class GPTAttention(nn.Module):
    """Causal multi-head attention."""

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
        mask: masks.Mask,
        past: dict[str, Tensor] | None,
        read: Any,
    ) -> tuple[Float[Tensor, "batch position width"], Any]:
        query = turn(self.split(self.query_layer(x)), positions)
        key = turn(self.split(self.key_layer(x)), positions)
        value = self.split(self.value_layer(x))
        if past is not None:
            # The keys and values of earlier positions are cached: only new positions are computed.
            if past:
                key = torch.cat([past["key"], key], dim=-2)
                value = torch.cat([past["value"], value], dim=-2)
            past.update(key=key, value=value)
        answer = attend(query, key, value, mask, read=read)
        context, seen = (answer, None) if read is None else answer
        return self.join(context.transpose(1, 2).flatten(2)), seen

    def split(self, x: Tensor) -> Float[Tensor, "batch head position head_dim"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class GPTBlock(nn.Module):
    """Attention, then a feed-forward network, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = GPTAttention(width, heads)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, positions: Tensor, mask: masks.Mask, past: Any, read: Any
    ) -> tuple[Tensor, Any]:
        mixed, seen = self.attention(self.attention_norm(x), positions, mask, past, read)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feed(self.feed_norm(x))), seen


class GPT(nn.Module):
    """A causal transformer that predicts the next token.

    >>> model = GPT(vocabulary=50, layers=2, heads=2, width=32, length=16)
    >>> tokens = torch.randint(50, (3, 7))
    >>> tuple(model(tokens).shape)
    (3, 7, 50)

    `vocabulary` is a number of tokens, or `Characters` for a model of text. `length` is the largest
    number of positions. `model(tokens, read=...)` gives `(logits, [one reading per layer])`.
    """

    name = "gpt"
    special = ()

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
        size = check_sizes(vocabulary, **self.config)
        self.embedding = nn.Embedding(size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, size, bias=False)
        self.apply(_small_weights)

    def forward(
        self,
        tokens: Int[Tensor, "batch position"],
        *,
        mask: masks.Mask | None = None,
        cache: list[dict[str, Tensor]] | None = None,
        read: Any = None,
    ) -> Any:
        """Return the logits of the next token at every position.

        `mask` narrows the causal mask (`masks.document(ids)`); `cache` (from `new_cache`) holds
        the positions before `tokens` and is extended by the new ones.
        """
        start = cache[0]["key"].shape[-2] if cache and cache[0] else 0
        check_tokens(tokens, self.length, start=start)
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens))

        allowed = masks.causal() if mask is None else masks.causal() & mask
        seen = []
        for number, block in enumerate(self.blocks):
            x, value = block(x, positions, allowed, cache[number] if cache else None, read)
            seen.append(value)

        logits = self.head(self.norm(x))
        return logits if read is None else (logits, seen)

    def new_cache(self) -> list[dict[str, Tensor]]:
        """Return an empty cache of keys and values, one for each layer."""
        return [{} for _ in self.blocks]

    def task(self, windows: Int[Tensor, "batch length+1"], generator: torch.Generator):
        """Make one training batch (tokens, targets, mask): at each position, the next token."""
        return windows[:, :-1], windows[:, 1:], None


def _small_weights(module: nn.Module) -> None:
    # Small weights make the first prediction uniform: the loss starts near log(vocabulary).
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
