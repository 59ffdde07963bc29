"""The one table of calls that every implementation, the gradients and the benchmarks go through.

Sizes are distinct primes plus the edges of tiles, so that a swapped axis or a wrong bound shows.
Each mask is given twice: as the library's, and as a formula on index arrays that knows nothing of
it (`i` counts queries as they stand among the sources, aligned at the end; `j` counts sources).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead import masks

Formula = Callable[[np.ndarray, np.ndarray], Any]


@dataclass(frozen=True)
class Case:
    """One call of `attend`, as sizes and features."""

    name: str
    batch: tuple[int, ...] = (2,)
    head: int = 3
    source_head: int | None = None
    query: int = 7
    source: int | None = None
    head_dim: int = 5
    value_dim: int | None = None
    mask: Callable[[], masks.Mask] | None = None
    formula: Formula | None = None
    random_mask: tuple[int, ...] | None = None  # shape of a random bool tensor as the mask
    bias: tuple[int, ...] | None = None  # shape
    blocked_bias: bool = False  # some of the bias is -inf
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    layout: str = "contiguous"  # or "heads_last", "sliced", "expanded", "transposed"
    size: float = 1.0  # of the numbers in query, key and value

    @property
    def sources(self) -> int:
        return self.query if self.source is None else self.source

    def inputs(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
        """Return the keyword arguments of `attend`; seeded by the case's name too."""
        draw = torch.Generator().manual_seed(seed + sum(map(ord, self.name)))
        heads = (self.head,) if self.head else ()
        source_heads = (self.source_head or self.head,) if self.head else ()
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        given: dict[str, Any] = {
            "query": self._tensor((*self.batch, *heads, self.query, self.head_dim), draw),
            "key": self._tensor((*self.batch, *source_heads, self.sources, self.head_dim), draw),
            "value": self._tensor((*self.batch, *source_heads, self.sources, value_dim), draw),
        }
        if self.mask is not None:
            given["mask"] = self.mask()
        if self.random_mask is not None:
            given["mask"] = torch.rand(self.random_mask, generator=draw) < 0.6
        if self.bias is not None:
            given["bias"] = torch.randn(self.bias, generator=draw)
            if self.blocked_bias:
                given["bias"][torch.rand(self.bias, generator=draw) < 0.4] = -torch.inf
        if self.sinks:
            given["sinks"] = torch.randn(max(self.head, 1), generator=draw)
        for name in ("query", "key", "value", "bias", "sinks"):
            if name in given:
                given[name] = given[name].to(dtype)
        given.update(
            {n: getattr(self, n) for n in ("softcap", "scale") if getattr(self, n) is not None}
        )
        return given

    def _tensor(self, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
        """Draw a tensor of this shape whose strides are the case's."""
        *lead, rows, width = shape
        if self.layout == "heads_last":  # (B, T, H, D) in memory
            *batch, head = lead
            x = torch.randn(*batch, rows, head, width, generator=draw).transpose(-2, -3)
        elif self.layout == "sliced":  # every other feature of a wider tensor, odd offset
            x = torch.randn(*lead, rows, 2 * width + 1, generator=draw)[..., 1::2]
        elif self.layout == "transposed":  # features are the slow axis
            x = torch.randn(*lead, width, rows, generator=draw).mT
        elif self.layout == "expanded":  # all heads share memory
            x = torch.randn(*lead[:-1], 1, rows, width, generator=draw).expand(shape)
        else:
            x = torch.randn(shape, generator=draw)
        return x * self.size if self.size != 1 else x

    def allowed(self, given: dict[str, Any]) -> Any:
        """Return which edges the mask allows, without asking the library."""
        if self.random_mask is not None:
            return given["mask"]
        if self.formula is None:
            return None
        i = np.arange(self.query)[:, None] + self.sources - self.query
        j = np.arange(self.sources)[None, :]
        edges = np.asarray(self.formula(i, j))
        return np.broadcast_to(edges, (*edges.shape[:-2], self.query, self.sources))

    def right(self, given: dict[str, Any], **more: Any) -> Any:
        """Return the oracle's answer to these inputs."""
        from tests import oracle

        allowed = self.allowed(given)
        given = {name: x for name, x in given.items() if name not in ("mask", "impl", "read")}
        return oracle.attend(
            given.pop("query"), given.pop("key"), given.pop("value"), allowed, **given, **more
        )


def naive(case: Case, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return context and log-sum-exp of a few lines of torch in the inputs' own dtype.

    They are the yardstick of errors.
    """
    query, key, value = given["query"], given["key"], given["value"]
    if case.head:
        group = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(group, -3) for x in (key, value))
    scale = given.get("scale", query.shape[-1] ** -0.5 if query.shape[-1] else 1.0)
    scores = query @ key.mT * scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if "bias" in given:
        scores = scores + given["bias"]
    allowed = case.allowed(given)
    if allowed is not None:
        edges = allowed if isinstance(allowed, Tensor) else torch.from_numpy(allowed.copy())
        scores = scores.masked_fill(~edges, -torch.inf)
    if case.sinks:
        sinks = given["sinks"] if not case.head else given["sinks"][:, None, None]
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : case.sources]
    return weights @ value, scores.logsumexp(-1)


def _lengths(*sizes: int) -> Formula:
    return lambda i, j: (j < np.array(sizes)[:, None, None, None]) & (i >= -(10**9))


IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3])
PREFIX = 3

CASES = [
    Case("plain"),
    Case("one sequence", batch=(), head=0),
    Case("one head", batch=(3,), head=0),
    Case("no batch", batch=(), head=0, query=11, source=13, value_dim=3),
    Case("two batch axes", batch=(2, 3), head=2, query=5, source=7, bias=(3, 1, 5, 7)),
    Case("value width", head_dim=5, value_dim=11, query=7, source=13),
    Case("wide", head_dim=67, value_dim=33, query=5, source=19),
    *(Case(f"edge {n}", batch=(1,), head=2, query=n, source=n, head_dim=8, mask=masks.causal,
           formula=lambda i, j: j <= i) for n in (1, 2, 15, 16, 17, 63, 64, 65)),
    Case("edge 129", batch=(1,), head=1, query=129, source=131, head_dim=3),
    Case("decode", query=1, source=37, mask=masks.causal, formula=lambda i, j: j <= i),
    Case("chunk", query=5, source=23, mask=masks.causal, formula=lambda i, j: j <= i),
    Case("fewer sources", query=13, source=5, mask=masks.causal, formula=lambda i, j: j <= i),
    Case("causal from the start", query=7, source=13, mask=lambda: masks.causal("start"),
         formula=lambda i, j: j <= i - 6),
    Case("causal at an offset", query=7, source=17, mask=lambda: masks.causal(4),
         formula=lambda i, j: j <= i - 10 + 4),
    Case("window", query=19, source=23, mask=lambda: masks.window(4),
         formula=lambda i, j: (i - 4 < j) & (j <= i)),
    Case("band", query=17, mask=lambda: masks.band(2, 3),
         formula=lambda i, j: (j >= i - 2) & (j <= i + 3)),
    Case("diagonal", query=17, mask=lambda: masks.diagonal(2), formula=lambda i, j: j == i - 2),
    Case("sink and window", query=31,
         mask=lambda: masks.window(3) | masks.first(2) & masks.causal(),
         formula=lambda i, j: (j <= i) & ((j > i - 3) | (j < 2))),
    Case("prefix", query=11, mask=lambda: masks.prefix(PREFIX) | masks.causal(),
         formula=lambda i, j: (j < PREFIX) | (j <= i)),
    Case("outside a window", query=13, mask=lambda: masks.causal() - masks.window(3),
         formula=lambda i, j: j <= i - 3),
    Case("not", query=11, mask=lambda: ~masks.causal(), formula=lambda i, j: j > i),
    Case("nothing", mask=masks.nothing, formula=lambda i, j: (i < 0) & (j < 0)),
    Case("everything", mask=masks.everything, formula=lambda i, j: (i == i) & (j == j)),
    Case("lengths", batch=(3,), head=2, query=7, source=11,
         mask=lambda: masks.lengths([11, 4, 0]), formula=_lengths(11, 4, 0)),
    Case("lengths and causal", batch=(3,), head=2, query=11,
         mask=lambda: masks.lengths([11, 4, 0]) & masks.causal(),
         formula=lambda i, j: _lengths(11, 4, 0)(i, j) & (j <= i)),
    Case("documents", query=11, mask=lambda: masks.document(IDS) & masks.causal(),
         formula=lambda i, j: (IDS.numpy()[i] == IDS.numpy()[j]) & (j <= i)),
    Case("edges", query=5, source=7, mask=lambda: masks.edges([(3, 0), (6, 2), (6, 4)]),
         formula=lambda i, j: (i == 3) & (j == 0) | (i == 6) & ((j == 2) | (j == 4))),
    Case("not edges", query=7, mask=lambda: masks.causal() - masks.edges([(3, 0), (6, 2)]),
         formula=lambda i, j: (j <= i) & ~((i == 3) & (j == 0) | (i == 6) & (j == 2))),
    Case("bool tensor", query=7, source=11, random_mask=(2, 3, 7, 11)),
    Case("bool tensor for all", query=7, source=11, random_mask=(7, 11)),
    Case("bool rows broadcast", query=7, source=11, random_mask=(2, 1, 1, 11)),
    Case("bool tensor for heads", query=7, source=11, random_mask=(3, 7, 11)),
    Case("bool tensor for a batch", batch=(3,), head=0, query=7, source=11, random_mask=(3, 7, 11)),
    Case("bool tensor, two batch axes", batch=(2, 3), head=2, query=5, source=7,
         random_mask=(3, 1, 1, 7)),
    Case("grouped", head=6, source_head=2, query=11, source=13, value_dim=7),
    Case("one source head", head=5, source_head=1, query=7, mask=masks.causal,
         formula=lambda i, j: j <= i),
    Case("bias", query=7, source=11, bias=(2, 3, 7, 11)),
    Case("bias for all", query=7, source=11, bias=(7, 11)),
    Case("bias for sources", query=7, source=11, bias=(3, 1, 11)),
    Case("bias for a batch", batch=(3,), head=0, query=7, source=11, bias=(3, 7, 11)),
    Case("bias blocks", query=7, source=11, bias=(3, 7, 11), blocked_bias=True),
    Case("softcap", query=7, source=11, softcap=1.5),
    Case("sinks", query=7, source=11, sinks=True),
    Case("sinks of empty rows", query=13, source=5, sinks=True, mask=masks.causal,
         formula=lambda i, j: j <= i),
    Case("scale 0", scale=0.0, mask=masks.causal, formula=lambda i, j: j <= i),
    Case("scale negative", scale=-0.7),
    Case("scale large", scale=30.0),
    Case("scale very negative", batch=(1,), head=2, query=67, scale=-1e5, mask=masks.causal,
         formula=lambda i, j: j <= i),
    Case("all features", batch=(2,), head=6, source_head=3, query=19, source=29, head_dim=11,
         value_dim=5, mask=lambda: masks.window(7) | masks.first(2), sinks=True, softcap=2.5,
         formula=lambda i, j: ((j <= i) & (j > i - 7)) | (j < 2), bias=(6, 19, 29),
         blocked_bias=True, scale=0.4),
    *(Case(layout, layout=layout, query=11, source=13, head_dim=7, value_dim=3, mask=masks.causal,
           formula=lambda i, j: j <= i)
      for layout in ("heads_last", "sliced", "transposed", "expanded")),
    Case("no queries", query=0, source=5),
    Case("no sources", query=5, source=0),
    Case("no positions", query=0, source=0, mask=masks.causal, formula=lambda i, j: j <= i),
    Case("no batch entries", batch=(0,)),
    Case("no heads", head=2, source_head=2, batch=(0,), query=3),
    Case("no features", head_dim=0, value_dim=3),
    Case("no features, causal", head_dim=0, value_dim=3, mask=masks.causal,
         formula=lambda i, j: j <= i),
    Case("no value features", value_dim=0),
    Case("one of each", batch=(1,), head=1, query=1, source=1, head_dim=1),
    Case("large numbers", size=40.0, query=11, source=13),
    Case("tiny numbers", size=1e-20, query=11, source=13),
]  # fmt: skip

BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES)
