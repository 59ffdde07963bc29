"""ALiBi and T5's buckets: biases that depend on the distance of query and source alone."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead._core import is_number, type_error, value_error

__all__ = ["alibi", "slopes", "t5_buckets"]


def slopes(heads: int) -> Float[Tensor, " head"]:
    """Return ALiBi's slope of each head, float32.

    >>> slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])

    2^(-8 h / heads) for h = 1..heads where that is a power of two; otherwise those of the power
    below it, then every other one of the power above (Press et al. 2022, "Train Short, Test Long").
    """
    heads = _whole("heads", heads, 1)
    below = 2 ** int(math.log2(heads))
    exponents = [-8 * h / below for h in range(1, below + 1)]
    exponents += [-4 * h / below for h in range(1, 2 * (heads - below), 2)]
    return torch.tensor(exponents, dtype=torch.float64).exp2().float()


def alibi(
    heads: int, query: int, source: int | None = None, *, device: torch.device | str | None = None
) -> Float[Tensor, "head query source"]:
    """Return ALiBi's bias, -slope * |distance|: 0 at the query's own position, lower away from it.

    >>> alibi(1, 1, 4)
    tensor([[[-0.0117, -0.0078, -0.0039,  0.0000]]])

    The last query stands at the last source, as in `masks.causal()`. One row that depends on the
    source alone, as some models add it, gives the same weights under a causal mask, but not with
    sink logits, nor where queries look ahead.
    """
    distance = _distances(query, source).abs()
    return (slopes(heads)[:, None, None] * -distance).to(device)


def t5_buckets(
    query: int,
    source: int | None = None,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    device: torch.device | str | None = None,
) -> Int[Tensor, "query source"]:
    """Return T5's bucket of each edge, int64: `table[t5_buckets(...)]` is the bias of all heads.

    >>> t5_buckets(1, 5, buckets=4, max_distance=8, bidirectional=False)
    tensor([[3, 2, 2, 1, 0]])
    >>> table = torch.zeros(32, 8)  # (bucket, head), learned
    >>> table[t5_buckets(6)].permute(2, 0, 1).shape  # (head, query, source), for bias=
    torch.Size([8, 6, 6])

    Half of the buckets hold one distance each, the others grow with the logarithm of the distance
    up to `max_distance`. With `bidirectional` (encoders) sources after the query have the second
    half of the buckets; without it (decoders) they share bucket 0. The last query stands at the
    last source. (Raffel et al. 2020, "Exploring the Limits of Transfer Learning".)
    """
    least = 4 if bidirectional else 2
    buckets = _whole("buckets", buckets, least)
    if bidirectional and buckets % 2:
        rule = "is even where both directions share it"
        raise value_error("buckets", rule, got=buckets, hint="take an even number")
    before = _distances(query, source)
    side = buckets // 2 if bidirectional else buckets
    exact = side // 2
    max_distance = _whole("max_distance", max_distance, exact + 1)
    first = torch.where(before < 0, side, 0) if bidirectional else torch.zeros_like(before)
    distance = before.abs() if bidirectional else before.clamp(min=0)
    growth = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (growth * (side - exact)).long()).clamp(max=side - 1)
    return (first + torch.where(distance < exact, distance, far)).to(device)


def _distances(query: int, source: int | None) -> Tensor:
    """How far each source lies before each query, (query, source); negative after it."""
    query = _whole("query", query, 0)
    source = query if source is None else _whole("source", source, 0)
    return torch.arange(source - query, source)[:, None] - torch.arange(source)


def _whole(name: str, given: int, least: int) -> int:
    if not is_number(given):
        raise type_error(name, "takes an integer", got=repr(given))
    if given < least:
        raise value_error(name, f"is at least {least}", got=given)
    return int(given)
