"""What the problems of `bits` are drawn from: sizes, masks, readings and tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead import masks, readings

SIZES = (1, 2, 3, 5, 7, 13, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 97, 127, 128, 129, 130)
WIDTHS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 32, 33, 48, 64, 65)


class Draw:
    """What one problem is drawn from, and the words that say what was drawn."""

    def __init__(self, seed: int, number: int) -> None:
        self.dice = random.Random(f"{seed}/{number}")
        self.numbers = torch.Generator().manual_seed(self.dice.getrandbits(60))
        self.words: list[str] = []

    def pick(self, what: str, *options: Any) -> Any:
        picked = self.dice.choice(options)
        self.words.append(f"{what} {picked}")
        return picked

    def chance(self, share: float, what: str) -> bool:
        hit = self.dice.random() < share
        self.words += [what] if hit else []
        return hit

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.numbers).to(dtype)

    def bools(self, share: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.numbers) < share

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.numbers)

    def each(self, *shape: int) -> tuple[int, ...]:
        """The shape, or only its last axis: the same numbers for every sample."""
        return shape[self.dice.randrange(2) :]


@dataclass(frozen=True)
class Sizes:
    """The axes of one call; `heads` is empty for inputs without a head axis."""

    lead: tuple[int, ...]
    heads: tuple[int, ...]
    query: int
    source: int

    @property
    def batch(self) -> int:
        return math.prod(self.lead)

    @property
    def whole(self) -> tuple[int, ...]:
        return (*self.lead, *self.heads, self.query, self.source)


def sizes(draw: Draw) -> Sizes:
    """Mostly small calls; some decode, some take several strips, and a few have nothing to do."""
    rank = draw.dice.choice((2, 3, 4, 4, 4, 4, 5))
    lead = tuple(draw.dice.choice((1, 1, 2, 3)) for _ in range({2: 0, 3: 1, 4: 1, 5: 2}[rank]))
    heads = (draw.dice.choice((1, 2, 3, 4, 6)),) if rank > 3 else ()
    query, source = draw.dice.choice(SIZES), draw.dice.choice(SIZES)
    if draw.chance(0.15, "decode"):
        query, source = draw.dice.choice((1, 1, 1, 2, 4)), draw.dice.choice((128, 131, 300, 1031))
    elif draw.chance(0.08, "long"):
        query, source = draw.dice.sample((257, 300, 521, 700), 2)
    elif draw.chance(0.3, "square"):
        source = query
    elif draw.chance(0.04, "no positions"):
        query, source = draw.dice.choice(((0, 5), (5, 0), (0, 0)))
    return Sizes(lead, heads, query, source)


ALIGN = ("end", "start", 3)
N = (1, 3, 16, 50)
LEAVES: dict[str, Callable[[Draw, Sizes], masks.Mask]] = {
    "everything": lambda d, s: masks.everything(),
    "nothing": lambda d, s: masks.nothing(),
    "causal": lambda d, s: masks.causal(d.pick("align", *ALIGN)),
    "window": lambda d, s: masks.window(d.pick("n", *N), d.pick("align", *ALIGN)),
    "band": lambda d, s: masks.band(
        d.pick("before", 0, 5), d.pick("after", 0, 2, 11), d.pick("align", *ALIGN)
    ),
    "diagonal": lambda d, s: masks.diagonal(d.pick("n", 0, *N), d.pick("align", *ALIGN)),
    "first": lambda d, s: masks.first(d.pick("n", *N)),
    "prefix": lambda d, s: masks.prefix(d.pick("n", *N)),
    "lengths": lambda d, s: masks.lengths(d.integers(s.source + 1, s.batch)),
    "lengths of both": lambda d, s: masks.lengths(
        d.integers(s.source + 1, s.batch), query=d.integers(s.query + 1, s.batch)
    ),
    "keep": lambda d, s: masks.keep(d.bools(0.7, *d.each(s.batch, s.source))),
    "same": lambda d, s: masks.same(
        d.integers(3, *d.each(s.batch, s.query)), d.integers(3, *d.each(s.batch, s.source))
    ),
    "dense": lambda d, s: masks.dense(d.bools(0.5, s.query, s.source)),
    "where": lambda d, s: masks.where(lambda b, h, q, k: (q * 3 + k * 5 + h + b) % 4 != 0),
    "document": lambda d, s: masks.document(d.integers(4, *d.each(s.batch, s.source)).sort()[0]),
    "induction": lambda d, s: masks.induction(d.integers(5, *d.each(s.batch, s.source))),
    "duplicate": lambda d, s: masks.duplicate(d.integers(5, *d.each(s.batch, s.source))),
    "edges": lambda d, s: masks.edges(
        [(s.source - 1 - k % s.query, k * 7 % s.source) for k in range(d.pick("n", *N))]
    ),
}
COMPOSE: dict[str, Callable[[Any, Any], Any]] = {
    "and": lambda left, right: left & right,
    "or": lambda left, right: left | right,
    "minus": lambda left, right: left - right,
    "not and": lambda left, right: ~left & right,
    "or not": lambda left, right: left | ~right,
}
# These speak of queries that stand among the sources.
WITHIN = ("document", "induction", "duplicate", "edges")


def broadcast(draw: Draw, s: Sizes) -> tuple[int, ...]:
    """A shape that broadcasts to the score map."""
    shape = s.whole[draw.dice.randrange(len(s.whole) - 1) :]
    return *(draw.dice.choice((1, n, n)) for n in shape[:-1]), shape[-1]


def leaf(draw: Draw, s: Sizes) -> masks.Mask:
    among = 0 < s.query <= s.source
    return LEAVES[draw.pick("mask", *(n for n in LEAVES if among or n not in WITHIN))](draw, s)


def edges_of(draw: Draw, s: Sizes) -> Any:
    """No mask, a bool tensor, one mask or several composed."""
    if draw.chance(0.15, "no mask"):
        return None
    if draw.chance(0.2, "bools"):
        return draw.bools(draw.pick("share", 0.02, 0.4, 0.9), *broadcast(draw, s))
    if draw.chance(0.5, "one"):
        return leaf(draw, s)
    found = leaf(draw, s)
    for _ in range(draw.dice.choice((1, 1, 2))):
        how = draw.pick("then", *COMPOSE)
        found = COMPOSE[how](found, leaf(draw, s))
    return found


READ: dict[str, Callable[[Draw, Sizes], readings.Reading]] = {
    "Weights": lambda d, s: readings.Weights(),
    "Scores": lambda d, s: readings.Scores(),
    "Rows": lambda d, s: readings.Rows([-1, 0] if s.query else []),
    "TopK": lambda d, s: readings.TopK(d.pick("k", 1, 3, 11)),
    "LogSumExp": lambda d, s: readings.LogSumExp(),
    "Entropy": lambda d, s: readings.Entropy(),
    "Normalized": lambda d, s: readings.Entropy(normalized=True),
    "Received": lambda d, s: readings.Received(),
    "Mass": lambda d, s: readings.Mass(leaf(d, s)),
    "Distance": lambda d, s: readings.Distance(),
    "BlockMap": lambda d, s: readings.BlockMap(d.pick("cells", 1, 4, 9)),
    "Overlap": lambda d, s: readings.Overlap(),
}


def read(draw: Draw, s: Sizes) -> dict[str, readings.Reading]:
    """Some of the readings by name, or all of them."""
    names = draw.dice.sample(sorted(READ), draw.dice.choice((0, 0, 1, 1, 2, 3, len(READ))))
    draw.words.append(f"read {' '.join(names) or 'nothing'}:")
    return {name: READ[name](draw, s) for name in names}


def laid_out(draw: Draw, *shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose place in memory is drawn, some of them NaN or infinite."""
    *lead, rows, width = shape
    how = draw.pick("lies", "plain", "plain", "heads last", "odd", "gaps", "transposed", "expanded")
    if how == "heads last" and lead:
        x = draw.tensor(*lead[:-1], rows, lead[-1], width, dtype=dtype).transpose(-2, -3)
    elif how in ("odd", "gaps"):
        step = 1 if how == "odd" else 2
        x = draw.tensor(*lead, rows, 2 * width + step, dtype=dtype)
        x = x[..., 1 : step * width + 1 : step]
    elif how == "transposed":
        x = draw.tensor(*lead, width, rows, dtype=dtype).mT
    elif how == "expanded" and lead:
        x = draw.tensor(*lead[:-1], 1, rows, width, dtype=dtype).expand(shape)
    else:
        x = draw.tensor(*shape, dtype=dtype)
    if x.numel() and draw.chance(0.12, "poisoned"):
        odd = draw.pick("with", math.nan, math.inf, -math.inf, 1e30, 1e-40)
        x[(0,) * len(lead)][draw.dice.choice((0, rows // 2, rows - 1))].copy_(torch.tensor(odd))
    return x


def tensors(draw: Draw, s: Sizes, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a call: query, key, value, and perhaps bias and sinks."""
    share = draw.pick("group", 1, *(n for n in (1, 2, 3) for h in s.heads if h % n == 0))
    heads = tuple(head // share for head in s.heads)
    width, value = (draw.dice.choice(WIDTHS) for _ in range(2))
    width = draw.pick("wide", 0, 128, 257) if draw.chance(0.04, "of") else width
    value = width if draw.chance(0.5, "one width") else value
    found = {
        "query": laid_out(draw, *s.lead, *s.heads, s.query, width, dtype=dtype),
        "key": laid_out(draw, *s.lead, *heads, s.source, width, dtype=dtype),
        "value": laid_out(draw, *s.lead, *heads, s.source, value, dtype=dtype),
    }
    if s.query == s.source and share == 1 and draw.chance(0.2, "all one tensor"):
        found["key"] = found["value"] = found["query"]
    if draw.chance(0.25, "bias"):
        bias = draw.tensor(*broadcast(draw, s), dtype=draw.pick("of", dtype, dtype, torch.float32))
        blocked = draw.bools(0.3 * draw.chance(0.5, "that blocks"), *bias.shape)
        found["bias"] = bias.masked_fill(blocked, -math.inf)
    if draw.chance(0.15, "sinks"):
        found["sinks"] = draw.tensor(*(s.heads or (1,)), dtype=dtype)
    return found
