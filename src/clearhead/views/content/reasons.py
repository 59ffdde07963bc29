"""Why an edge is allowed or blocked: the parts of a mask, and its own words."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from clearhead._core import Sizes
from clearhead.masks import Mask, leaves
from clearhead.views.page import codes

__all__ = ["MaskReasons", "reasons_of", "words_of"]

# Up to so many edges a file holds the words of each; of larger masks, the parts that decide.
WORDED = 48 * 48
# More parts than this are not told apart.
PARTS = 12


@dataclass
class MaskReasons:
    """For each call its parts, the chunks these need, and the words that can be asked for."""

    parts: list[list[dict[str, str]]] = field(default_factory=list)
    makers: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    asked: dict[str, Callable[..., bytes]] = field(default_factory=dict)


def reasons_of(masks: Sequence[tuple[Mask | None, Sizes]], live: bool) -> MaskReasons:
    """What a page says of the masks of its calls; calls with one mask share the chunks."""
    found, known = MaskReasons(), list[tuple[Mask, Sizes, list[dict[str, str]]]]()
    for index, (mask, sizes) in enumerate(masks):
        if mask is None:
            found.parts.append([])
            continue
        parts = next((p for m, s, p in known if s == sizes and m == mask), None)
        if parts is None:
            parts = _parts(mask, sizes, index, found.makers)
            known.append((mask, sizes, parts))
        found.parts.append(parts)
    if live:
        found.asked["why"] = partial(_ask, masks)
    return found


def words_of(mask: Mask, sizes: Sizes, sample: int, query: int, source: int) -> list[str]:
    """Why the mask allows or blocks an edge, in its own words."""
    head = 0 if mask.own.head not in (None, 1) else None
    where = {"query": sizes.query, "source": sizes.source, "head": head}
    sample_ = sample if mask.own.batch not in (None, 1) else None
    lines = mask.why(query, source, sample=sample_, **where).split("\n")[1:]
    return [line.removeprefix("- ") for line in lines]


def worded(mask: Mask, sizes: Sizes, sample: int) -> bytes:
    """The words of every edge, as JSON: a list of rows of lists."""
    rows = [
        [words_of(mask, sizes, sample, query, source) for source in range(sizes.source)]
        for query in range(sizes.query)
    ]
    return json.dumps(rows, separators=(",", ":")).encode()


def _parts(
    mask: Mask, sizes: Sizes, index: int, makers: dict[str, Callable[[], bytes]]
) -> list[dict[str, str]]:
    """Each leaf of the mask with its own edges."""
    parts = leaves(mask)
    if len(parts) > PARTS:
        return []
    if len(parts) == 1 and parts[0][1] is mask:
        return [{"name": parts[0][0], "mask": f"mask/0/{index}"}]
    for number, (_, part) in enumerate(parts):
        for sample in range(sizes.batch):
            make = partial(codes.mask_runs, part, sizes, sample)
            makers[f"part/{sample}/{index}/{number}"] = make
    return [{"name": name, "mask": f"part/0/{index}/{n}"} for n, (name, _) in enumerate(parts)]


def _ask(masks: Sequence[tuple[Mask | None, Sizes]], *place: int) -> bytes:
    sample, index, query, source = place
    mask, sizes = masks[index]
    words = [] if mask is None else words_of(mask, sizes, sample, query, source)
    return json.dumps(words).encode()
