"""The readings: what each is on the full weights, how it is folded, and how large its value is."""

# The methods are documented once, in Reading.
# ruff: noqa: D102
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead._core import Sizes, is_number, type_error, value_error
from clearhead.masks import Mask
from clearhead.readings.cells import positive
from clearhead.readings.fold import (
    Blocks,
    MapReading,
    PerQuery,
    PerQueryReading,
    SumReading,
    place,
)
from clearhead.readings.strip import Strip

__all__ = [
    "Distance",
    "Entropy",
    "LogSumExp",
    "Mass",
    "MaxScore",
    "Received",
    "Rows",
    "Scores",
    "TopK",
    "TopKValue",
    "Weights",
]


class Weights(MapReading, splits_grad=True, adds_up=True):
    """The whole weight map, (*batch, head, query, source): softmax of the scores over the sources.

    >>> scores = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    >>> Weights().fold([Strip.of(scores)])
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])

    Rows sum to one; to less with sinks, and to 0 where nothing is allowed. This takes memory for
    query x source numbers a head: `Rows`, `TopK`, `BlockMap` and the sums do not.
    """

    def part(self, strip: Strip) -> Blocks:
        piece = (strip.queries, strip.sources, strip.weights)
        return Blocks((piece,), strip.query, strip.source)


class Scores(MapReading, splits_grad=True, adds_up=True):
    """The scores after scale, softcap and bias, (*batch, head, query, source); -inf where blocked.

    >>> Scores().fold([Strip.of(torch.tensor([[0.5, -torch.inf], [0.0, 2.0]]))])
    tensor([[0.5000,   -inf],
            [0.0000, 2.0000]])

    `weights == exp(scores - lse)`. Memory as for `Weights`.
    """

    _blocked = -torch.inf

    def part(self, strip: Strip) -> Blocks:
        piece = (strip.queries, strip.sources, strip.scores)
        return Blocks((piece,), strip.query, strip.source)


class Rows(SumReading, splits_grad=True, adds_up=True):
    """The weights of chosen queries, (*batch, head, chosen, source), in the order given.

    >>> scores = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    >>> Rows([-1]).fold([Strip.of(scores)])
    tensor([[0.5000, 0.5000]])

    `queries` is a position or several; negative ones count from the last query.
    """

    def __init__(self, queries: int | Sequence[int] | Tensor):
        given: Any = queries.tolist() if isinstance(queries, Tensor) else queries
        listed: list[Any] = [given] if is_number(given) else list(given)
        if not all(is_number(position) for position in listed):
            raise type_error("queries", "takes positions, as integers", got=repr(queries))
        self.queries: tuple[int, ...] = tuple(int(position) for position in listed)

    def check(self, sizes: Sizes) -> None:
        for position in self.queries:
            if not -sizes.query <= position < sizes.query:
                raise value_error(
                    "queries",
                    f"positions lie in 0..{sizes.query - 1}, or count from the end",
                    got=position,
                    shapes={"(query, source)": (sizes.query, sizes.source)},
                    hint="choose a position below the number of queries",
                )

    def part(self, strip: Strip) -> Tensor:
        self.check(strip.sizes)
        chosen = [position % strip.query for position in self.queries]
        wanted = torch.tensor(chosen, dtype=torch.int64, device=strip.queries.device)
        if not chosen:
            # No rows, but rows of this call: they have a gradient, which is 0.
            return place(strip.weights[..., :0, :], strip.sources, strip.source)
        if not len(strip.queries):
            shape = (*strip.weights.shape[:-2], len(chosen), strip.source)
            return strip.weights.new_zeros(shape)
        at = torch.searchsorted(strip.queries, wanted).clamp(max=len(strip.queries) - 1)
        seen = strip.queries[at] == wanted
        rows = torch.where(seen[:, None], strip.weights.index_select(-2, at), 0)
        return place(rows, strip.sources, strip.source)

    def nbytes(self, sizes: Sizes, itemsize: int = 4) -> int:
        return sizes.batch * sizes.head * len(self.queries) * sizes.source * itemsize


class _Top(NamedTuple):
    weights: Tensor  # (*batch, head, query, k)
    sources: Tensor  # the same, int64


class TopKValue(_Top):
    """The value of `TopK`: the largest weights of each query and the sources that have them."""

    __slots__ = ()

    def __new__(cls, *parts: Any, **named: Any) -> TopKValue:
        # A subclass of Tensor makes the results of its functions anew, from one iterable.
        return super().__new__(cls, *(parts if named or len(parts) != 1 else parts[0]), **named)


class TopK(PerQueryReading, splits_grad=True):
    """The k largest weights of every query and their sources, as a named pair (weights, sources).

    >>> scores = torch.tensor([[0.0, -torch.inf, -torch.inf], [0.0, 0.0, -torch.inf]])
    >>> top = TopK(2).fold([Strip.of(scores)])
    >>> top.weights
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    >>> top.sources
    tensor([[ 0, -1],
            [ 0,  1]])

    Both are (*batch, head, query, k). They are ordered by their scores, and equal scores go to the
    lower source first; rows with fewer than k allowed sources end in weight 0, source -1.
    """

    axis = -2
    _empty = (0.0, -1, -torch.inf)

    def __init__(self, k: int):
        self.k = positive("k", k)

    def part(self, strip: Strip) -> PerQuery:
        # Weights of equal scores may differ in their last bit: the scores decide. NaN sorts as the
        # largest, as in torch.sort, so that it shows in the result.
        key = torch.where(strip.weights.isnan(), torch.nan, strip.scores).detach()
        order = key.sort(dim=-1, descending=True, stable=True).indices[..., : self.k]
        real = strip.allowed.gather(-1, order)
        weights = torch.where(real, strip.weights.gather(-1, order), 0)
        sources = torch.where(real, strip.sources[order], -1)
        values = (weights, sources, key.gather(-1, order))
        short = (0, self.k - order.shape[-1])
        pairs = zip(values, self._empty, strict=True)
        padded = (torch.nn.functional.pad(x, short, value=empty) for x, empty in pairs)
        return PerQuery(strip.queries, tuple(padded))

    def _combine(self, left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values = [torch.cat(pair, -1) for pair in zip(left, right, strict=True)]
        order = values[1].sort(-1).indices
        values = [x.gather(-1, order) for x in values]
        order = values[2].sort(dim=-1, descending=True, stable=True).indices[..., : self.k]
        return tuple(x.gather(-1, order) for x in values)

    def finish(self, part: PerQuery) -> TopKValue:
        return TopKValue(*part.values[:2])

    def nbytes(self, sizes: Sizes, itemsize: int = 4) -> int:
        # Positions are int64.
        return sizes.batch * sizes.head * sizes.query * self.k * (itemsize + 8)


class LogSumExp(PerQueryReading, splits_grad=True):
    """The log of the softmax's denominator, (*batch, head, query): lse = ln sum_j exp(score_j).

    >>> LogSumExp().fold([Strip.of(torch.tensor([[0.0, 0.0], [1.0, -torch.inf]]))])
    tensor([0.6931, 1.0000])

    Sink logits count as further scores; -inf where nothing is allowed. It is read from strips that
    know it; the log-sum-exp of chunks of sources is the `torch.logaddexp` of the chunks' own.
    """

    _empty = (-torch.inf,)

    def part(self, strip: Strip) -> PerQuery:
        return PerQuery(strip.queries, (strip.lse,))

    def _combine(self, left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.maximum(left[0], right[0]),)


class MaxScore(PerQueryReading, splits_grad=True):
    """The largest score of each query, (*batch, head, query): the field's "max attention logit".

    >>> MaxScore().fold([Strip.of(torch.tensor([[0.5, -torch.inf], [0.0, 2.0]]))])
    tensor([0.5000, 2.0000])

    It is taken after scale, softcap and bias; -inf where nothing is allowed, and sink logits do not
    count. Equal scores share its gradient, as in `torch.amax`. It grows before a training with too
    large a learning rate diverges (Wortsman et al. 2023, "Small-scale proxies for large-scale
    Transformer training instabilities"), and QK-clip bounds it (Kimi Team 2025, "Kimi K2").
    """

    _empty = (-torch.inf,)

    def part(self, strip: Strip) -> PerQuery:
        if not strip.scores.shape[-1]:
            return PerQuery(strip.queries, (strip.scores.new_full(strip.lse.shape, -torch.inf),))
        return PerQuery(strip.queries, (strip.scores.amax(-1),))

    def _combine(self, left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.maximum(left[0], right[0]),)


class Entropy(PerQueryReading, splits_grad=True, adds_up=True):
    """How spread the weights of each query are, in nats, (*batch, head, query): -sum_j w_j ln w_j.

    >>> scores = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, -torch.inf, -torch.inf]])
    >>> Entropy().fold([Strip.of(scores)])
    tensor([0.6931, 0.0000])
    >>> Entropy(normalized=True).fold([Strip.of(scores)])
    tensor([1., 0.])

    `normalized` divides by the log of the number of allowed sources: 1 is uniform, and a row with
    one source or none has 0. Low entropy marks a head that has collapsed onto few sources (Zhai et
    al. 2023, "Stabilizing Transformer Training by Preventing Attention Entropy Collapse").
    """

    def __init__(self, normalized: bool = False):
        self.normalized = bool(normalized)
        self._empty = (0.0, 0) if self.normalized else (0.0,)

    def part(self, strip: Strip) -> PerQuery:
        # -ln w also equals lse - score, which stays finite where w underflows, so that w ln w and
        # its gradient are right there; where scores are large it is a difference of large numbers.
        large = strip.weights > 1e-30
        far = torch.where(strip.allowed & ~large, strip.lse.unsqueeze(-1) - strip.scores, 0)
        surprise = far - torch.where(large, strip.weights, 1).log()
        entropy = (strip.weights * surprise).sum(-1)
        counts = (strip.allowed.sum(-1),) if self.normalized else ()
        return PerQuery(strip.queries, (entropy, *counts))

    def finish(self, part: PerQuery) -> Tensor:
        entropy, *counts = part.values
        # Rounding makes no entropy negative; the gradient passes as it is.
        entropy = entropy - entropy.detach().clamp(max=0)
        if not counts:
            return entropy
        many = counts[0] > 1
        largest = torch.where(many, counts[0], 2).to(entropy.dtype).log()
        # A row with a single source has no distribution to normalize.
        return torch.where(many | entropy.isnan(), entropy / largest, 0)

    def __repr__(self) -> str:
        return f"Entropy(normalized={self.normalized})"


class Received(SumReading, splits_grad=True, adds_up=True):
    """The weight that each source receives from all queries, (*batch, head, source): sum_i w_ij.

    >>> Received().fold([Strip.of(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))])
    tensor([1.5000, 0.5000])

    Sources that receive much weight whatever they contain are attention sinks (Xiao et al. 2023,
    "Efficient Streaming Language Models with Attention Sinks"); caches are pruned by it (Zhang et
    al. 2023, "H2O").
    """

    def part(self, strip: Strip) -> Tensor:
        return place(strip.weights.sum(-2), strip.sources, strip.source)

    def nbytes(self, sizes: Sizes, itemsize: int = 4) -> int:
        return sizes.batch * sizes.head * sizes.source * itemsize


class Mass(PerQueryReading, splits_grad=True, adds_up=True):
    """The weight each query puts on a set of edges, (*batch, head, query): sum_{j in edges} w_ij.

    >>> from clearhead import masks
    >>> Mass(masks.first(1)).fold([Strip.of(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))])
    tensor([1.0000, 0.5000])

    `edges` is any mask: `first(4)` gives the attention sinks, `diagonal(1)` the previous-token
    score, `induction(tokens)` the induction score (Olsson et al. 2022, "Induction Heads").
    """

    def __init__(self, edges: Mask):
        if not isinstance(edges, Mask):
            hint = "masks.dense(tensor) makes one of a bool tensor"
            raise type_error("edges", "takes a mask", got=type(edges).__name__, hint=hint)
        self.edges = edges

    def check(self, sizes: Sizes) -> None:
        self.edges.check(sizes)

    def tensors(self) -> list[Tensor]:
        return self.edges.tensors()

    def part(self, strip: Strip) -> PerQuery:
        self.check(strip.sizes)
        edges = self.edges.tile(strip.queries, strip.sources, strip.sizes)
        if edges.dim() == 4:  # the mask's one batch axis stands for all of the weights'
            *batch, _, _, _ = strip.weights.shape if strip.weights.dim() > 2 else (1, 1, 1)
            edges = edges[0] if edges.shape[0] == 1 else edges.reshape(*batch, *edges.shape[1:])
            edges = edges[0] if strip.weights.dim() == 2 else edges
        return PerQuery(strip.queries, (torch.where(edges, strip.weights, 0).sum(-1),))


class Distance(PerQueryReading, splits_grad=True, adds_up=True):
    """How far each query looks, in positions, (*batch, head, query): sum_j w_ij |i - j|.

    >>> Distance().fold([Strip.of(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))])
    tensor([0.0000, 0.5000])

    The last query stands at the last source, as in the masks' default alignment. A sink's share
    counts as distance 0. (Vig and Belinkov 2019, "Analyzing the Structure of Attention in a
    Transformer Language Model".)
    """

    def part(self, strip: Strip) -> PerQuery:
        positions = strip.queries + (strip.source - strip.query)
        distance = (positions[:, None] - strip.sources).abs().to(strip.weights.dtype)
        return PerQuery(strip.queries, ((strip.weights * distance).sum(-1),))
