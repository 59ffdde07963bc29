"""One attention call of a model in clearhead's terms, however the model makes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from clearhead import masks
from clearhead._capture.axes import Place
from clearhead._core import Sizes, plain
from clearhead.attention import Problem
from clearhead.masks import Mask
from clearhead.readings import Reading

__all__ = [
    "Call",
    "CallSite",
    "EagerCall",
    "FusedCall",
    "dense_edges",
    "plain_call",
    "unmasked",
    "wide",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class CallSite:
    """Where in the model a call is made and how; what fused and eager calls have in common."""

    how: str = "sdpa"
    scale: float | None = None
    dropout: float = 0.0
    module: str = ""
    layer: int = 0
    call: int = 0
    kind: str = "self"
    place: Place | None = None  # where it is a slice of the whole map of its module

    @cached_property
    def sizes(self) -> Sizes:
        """Batch, (query) heads, queries and sources."""
        raise NotImplementedError

    @property
    def heads(self) -> range:
        """The numbers of its heads in the layer, of which other ranks may hold others."""
        start = self.place.heads.start if self.place and self.place.heads else 0
        return range(start, start + self.sizes.head)

    @property
    def all_heads(self) -> int:
        """How many heads the layer has, on all ranks."""
        return self.place.heads.whole if self.place and self.place.heads else self.sizes.head

    @property
    def ranks(self) -> bool:
        """Whether other ranks hold other heads of the layer."""
        return self.place is not None and self.place.heads is not None


class Spread(Protocol):
    """The whole of a call whose queries are split over ranks; it has the sources of all of them."""

    first: int  # the position of its first query
    sizes: Sizes
    mask: Mask | None
    bias: Tensor | None

    def read(self, call: Any, wanted: Sequence[Reading]) -> list[Any]:
        """Give one value for each reading, in positions of the whole; all ranks call it."""
        ...


@dataclass(frozen=True, eq=False)
class FusedCall(CallSite):
    """A call of a kernel, which never makes the weights."""

    query: Tensor  # (batch, head, query, head_dim)
    key: Tensor  # (batch, source_head, source, head_dim)
    value: Tensor  # (batch, source_head, source, value_dim)
    mask: Mask | None = None
    bias: Tensor | None = None  # broadcasts to (batch, head, query, source)
    softcap: float | None = None
    sinks: Tensor | None = None  # (head,)
    spread: Spread | None = None  # where other ranks have the other queries

    @cached_property
    def sizes(self) -> Sizes:
        """Batch, (query) heads, queries and sources."""
        batch, head, query, _ = self.query.shape
        return Sizes(batch, head, query, self.key.shape[-2])

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.query.device

    @property
    def source_heads(self) -> int:
        """How many heads the keys have."""
        return self.key.shape[1]

    @property
    def score_scale(self) -> float:
        """What the scores are multiplied by."""
        return 1 / math.sqrt(max(self.query.shape[-1], 1)) if self.scale is None else self.scale

    @property
    def problem(self) -> Problem:
        """The call as every implementation of `attend` receives it."""
        return Problem(
            self.query,
            self.key,
            self.value,
            self.mask,
            self.score_scale,
            bias=self.bias,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def with_heads(self, heads: Sequence[int]) -> FusedCall:
        """Keep some (query) heads, in the order given."""
        at = list(heads)
        group = self.query.shape[1] // self.key.shape[1]
        shared = [head // group for head in at]
        mask = self.mask
        if mask is not None and mask.own.head not in (None, 1):
            mask = masks.dense(dense_edges(mask, self)[:, at])
        return replace(
            self,
            query=self.query[:, at],
            key=self.key[:, shared],
            value=self.value[:, shared],
            mask=mask,
            bias=self.bias if self.bias is None or self.bias.shape[1] == 1 else self.bias[:, at],
            sinks=None if self.sinks is None else self.sinks[at],
        )

    def with_samples(self, samples: slice) -> FusedCall:
        """Keep some samples."""
        mask, batch = self.mask, self.sizes.batch
        if mask is not None and mask.own.batch not in (None, 1):
            mask = masks.dense(dense_edges(mask, self)[samples])
        return replace(
            self,
            query=self.query[samples],
            key=_of_samples(self.key, samples, batch),
            value=_of_samples(self.value, samples, batch),
            mask=mask,
            bias=None if self.bias is None else _of_samples(self.bias, samples, batch),
        )

    def of_all_ranks(self) -> FusedCall:
        """Give a call with the mask and the sizes of the whole, whose queries hold nothing."""
        if self.spread is None:
            return self
        shape = (*self.query.shape[:2], self.spread.sizes.query, self.query.shape[3])
        query, whole = self.query.new_zeros(()).expand(shape), self.spread
        return replace(self, query=query, mask=whole.mask, bias=whole.bias, spread=None)

    def with_queries(self, queries: slice) -> FusedCall:
        """Keep the queries of some rows; mask and bias stay those of all rows."""
        return replace(self, query=self.query[:, :, queries])


@dataclass(frozen=True, eq=False)
class EagerCall(CallSite):
    """Matmul, softmax, matmul: a call whose scores and weights the model makes itself."""

    scores: Tensor  # (batch, head, query, source), as they enter the softmax
    weights: Tensor  # the same shape, before dropout
    value: Tensor  # (batch, head, source, value_dim)
    key: Tensor | None = None  # (batch, source_head, source, head_dim), where it is known
    sink_scores: Tensor | None = None  # (batch, head, query, any): in the softmax, without a value
    lse: Tensor | None = None  # (batch, head, query), where it is known: see `lse_of`
    dropped: Tensor | None = None  # the weights after dropout, where it was on
    proven: bool = True  # False where more than one softmax may have made the weights

    @cached_property
    def sizes(self) -> Sizes:
        """Batch, (query) heads, queries and sources."""
        return Sizes(*self.scores.shape)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.scores.device

    @property
    def source_heads(self) -> int | None:
        """How many heads the keys have, where the keys are known."""
        return None if self.key is None else self.key.shape[1]

    @property
    def score_scale(self) -> float | None:
        """What the scores are multiplied by, where it is known."""
        return self.scale

    @torch.no_grad()
    def lse_of(self, rows: slice | Tensor) -> Tensor:
        """Give the log-sum-exp of scores and sink logits of some rows, (batch, head, row)."""
        if self.lse is not None:
            return self.lse[:, :, rows]
        lse = torch.logsumexp(wide(self.scores[:, :, rows]), -1)
        if self.sink_scores is None:
            return lse
        return torch.logaddexp(lse, torch.logsumexp(wide(self.sink_scores[:, :, rows]), -1))

    def with_heads(self, heads: Sequence[int]) -> EagerCall:
        """Keep some heads, in the order given; the keys stay those of all heads."""
        at = list(heads)
        return replace(
            self,
            scores=self.scores[:, at],
            weights=self.weights[:, at],
            lse=None if self.lse is None else self.lse[:, at],
            value=self.value[:, at],
            sink_scores=None if self.sink_scores is None else self.sink_scores[:, at],
            dropped=None if self.dropped is None else self.dropped[:, at],
        )

    def with_samples(self, samples: slice) -> EagerCall:
        """Keep some samples."""
        batch = self.sizes.batch
        return replace(
            self,
            scores=self.scores[samples],
            weights=self.weights[samples],
            lse=None if self.lse is None else self.lse[samples],
            value=_of_samples(self.value, samples, batch),
            key=None if self.key is None else _of_samples(self.key, samples, batch),
            sink_scores=None if self.sink_scores is None else self.sink_scores[samples],
            dropped=None if self.dropped is None else self.dropped[samples],
        )

    def with_queries(self, queries: slice) -> EagerCall:
        """Keep the scores, weights and log-sum-exp of some rows."""
        return replace(
            self,
            scores=self.scores[:, :, queries],
            weights=self.weights[:, :, queries],
            lse=self.lse_of(queries),
        )


Call: TypeAlias = FusedCall | EagerCall


def plain_call(call: Call) -> Call:
    """Give a call with its values alone, without wrappers of `torch.func` and subclasses."""
    held = vars(call).items()
    changed = {name: y for name, x in held if isinstance(x, Tensor) and (y := plain(x)) is not x}
    return replace(call, **changed) if changed else call


def _of_samples(x: Tensor, samples: slice, batch: int) -> Tensor:
    return x if x.shape[0] == 1 != batch else x[samples]


def dense_edges(edges: Mask, call: Call) -> Tensor:
    """Give edges as a tensor for a call, bool (batch or 1, head or 1, query, source)."""
    batch, heads, query, source = call.sizes
    found = edges.dense(query, source, batch=batch, head=heads, device=call.device)
    return found.reshape((1,) * (4 - found.ndim) + tuple(found.shape))


def wide(x: Tensor) -> Tensor:
    """Give a tensor in float32, or in float64 where it is so."""
    return x if x.dtype == torch.float64 else x.float()


def unmasked(scores: Tensor) -> Tensor:
    """Tell which scores a model has not masked: by -inf, or about the lowest number of the dtype.

    In a row where all are that low the finite constant masks nothing: the softmax is uniform.
    """
    masked = scores <= torch.finfo(scores.dtype).min / 2
    closed = masked.all(-1, keepdim=True)
    if not bool(closed.any()):
        return ~masked
    return ~masked | (closed & (scores > -math.inf).all(-1, keepdim=True))
