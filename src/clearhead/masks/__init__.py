"""Masks: sets of edges that compose. Edge (i, j) says that query i may read source j.

>>> from clearhead import masks
>>> print((masks.causal() & masks.window(3) | masks.first(1)).picture(6))
  0 1 2 3 4 5
0 ■ · · · · ·
1 ■ ■ · · · ·
2 ■ ■ ■ · · ·
3 ■ ■ ■ ■ · ·
4 ■ · ■ ■ ■ ·
5 ■ · · ■ ■ ■

True means "may attend" everywhere; the polarity of other APIs stays inside converters named after
them: `to_sdpa`, `to_multihead`, `to_additive`, `to_flex`, and `from_...` back.
"""

from __future__ import annotations

from typing import Any

from clearhead._core import did_you_mean
from clearhead.masks.convert import (
    from_additive,
    from_cu_seqlens,
    from_flex,
    from_huggingface,
    from_multihead,
    from_sdpa,
)
from clearhead.masks.data import dense, keep, lengths
from clearhead.masks.data import only_ones_and_zeros as only_ones_and_zeros
from clearhead.masks.edgewise import edges, where
from clearhead.masks.edgewise import from_ranges as from_ranges
from clearhead.masks.expression import MAY_ATTEND as MAY_ATTEND
from clearhead.masks.expression import guess as guess
from clearhead.masks.expression import no_mask as no_mask
from clearhead.masks.expression import parse
from clearhead.masks.ids import document, duplicate, induction, same
from clearhead.masks.mask import Mask
from clearhead.masks.positional import (
    band,
    causal,
    chunk,
    diagonal,
    everything,
    first,
    nothing,
    prefix,
    window,
)
from clearhead.masks.protocol import Block
from clearhead.masks.protocol import EdgeSet as EdgeSet
from clearhead.masks.ranges import Ranges as Ranges
from clearhead.masks.text import Map, default_sizes, picture
from clearhead.masks.text import leaves as leaves

EMPTY, PARTIAL, FULL = Block

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Block",
    "Map",
    "Mask",
    "band",
    "causal",
    "chunk",
    "default_sizes",
    "dense",
    "diagonal",
    "document",
    "duplicate",
    "edges",
    "everything",
    "first",
    "from_additive",
    "from_cu_seqlens",
    "from_flex",
    "from_huggingface",
    "from_multihead",
    "from_sdpa",
    "induction",
    "keep",
    "lengths",
    "nothing",
    "parse",
    "picture",
    "prefix",
    "same",
    "where",
    "window",
]


def __getattr__(name: str) -> Any:
    """Suggest masks for an unknown name."""
    also = did_you_mean("" if name.startswith("_") else guess(name))
    raise AttributeError(f"module 'clearhead.masks' has no attribute {name!r}{also}")
