"""The page of masks: who may attend to whom, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from clearhead._core import Sizes, value_error
from clearhead.masks import Mask, default_sizes, everything
from clearhead.recording import Record
from clearhead.views.content.chunks import PageContent
from clearhead.views.content.reasons import WORDED, reasons_of, worded
from clearhead.views.labels import many
from clearhead.views.page import codes
from clearhead.views.page.axes import Axis, CallPlace, axes_of

__all__ = ["ShownMask", "masks_of", "shown_mask"]

# Positions a side of the largest mask that a file holds.
LARGEST = 8192


@dataclass(frozen=True)
class MaskCall:
    """A mask as it is shown: that of one attention call, or one by itself."""

    mask: Mask
    sizes: Sizes
    layer: int = 0
    module: str = ""
    call: int = 0
    kind: str = "self"
    axes: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ShownMask:
    """Masks, and the labels of their positions."""

    calls: tuple[MaskCall, ...]
    axes: tuple[Axis, ...]
    title: str

    @property
    def extent(self) -> str:
        """How much is shown, in words."""
        return many(len(self.calls), "mask")

    def check(self) -> None:
        """Refuse a mask that no page draws."""
        for call in self.calls:
            if max(call.sizes[2:]) > LARGEST:
                rule = f"is drawn for up to {LARGEST:,} positions a side"
                hint = "give fewer with query= and source= (-q and -s)"
                raise value_error("mask", rule, got=f"{max(call.sizes[2:]):,}", hint=hint)

    def pages(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the header and all chunks."""
        return self.content().whole()

    def content(self, live: bool = False) -> PageContent:
        """The header, with what makes each chunk."""
        reasons = reasons_of([(call.mask, call.sizes) for call in self.calls], live)
        makers, entries, batch = reasons.makers, [], 1
        for index, call in enumerate(self.calls):
            batch = max(batch, call.sizes.batch)
            small = not live and call.sizes.query * call.sizes.source <= WORDED
            for sample in range(call.sizes.batch):
                runs = partial(codes.mask_runs, call.mask, call.sizes, sample)
                makers[f"mask/{sample}/{index}"] = runs
                if small:
                    words = partial(worded, call.mask, call.sizes, sample)
                    makers[f"why/{sample}/{index}"] = words
            entries.append(_entry(call, index, reasons.parts[index], small))
        edges = [f"{call.mask!r:.300}" for call in self.calls if len(self.calls) == 1]
        header = {
            "schema": "clearhead.view",
            "version": 1,
            "kind": "mask",
            "title": self.title,
            "made_by": "clearhead",
            "notes": [],
            "holds": ["Every edge, and why it is allowed or blocked.", *edges],
            "samples": batch,
            "axes": [axis.entry() for axis in self.axes],
            "layers": entries,
            "statistics": [],
            "effects": [],
            "chunks": {},
            "live": live,
        }
        return PageContent(header, makers, reasons.asked)


def shown_mask(
    mask: Mask, query: int | None, source: int | None, tokens: Any, title: str | None
) -> ShownMask:
    """Show one mask, for as many positions as are given, as it has data for, or 8."""
    own = default_sizes(mask)
    length = None if tokens is None else len(list(tokens))
    source = (length or (own[1] if query is None else query)) if source is None else source
    query = (length or own[0]) if query is None else query
    sizes = Sizes(mask.own.batch or 1, mask.own.head or 1, query, source)
    mask.check(sizes)
    axes, at = axes_of([CallPlace("self", "", sizes)], tokens)
    # The first line of its print: the expression without the usual alignment.
    name = str(mask).partition("\n")[0]
    name = name if len(name) <= 80 else f"{name[:79]}…"
    return ShownMask((MaskCall(mask, sizes, axes=at[0]),), tuple(axes), title or name)


def masks_of(records: Sequence[Record], tokens: Any, title: str | None) -> ShownMask:
    """Show the masks of the calls that were watched, as the model really made them."""
    axes, at = axes_of([CallPlace(r.kind, r.module, r.sizes) for r in records], tokens)
    calls = tuple(
        MaskCall(everything() if r.mask is None else r.mask, r.sizes, r.layer, r.module, r.call,
                 r.kind, pair)
        for r, pair in zip(records, at, strict=True)
    )  # fmt: skip
    return ShownMask(calls, tuple(axes), title or "Masks of a model")


def _entry(call: MaskCall, index: int, parts: list[dict[str, str]], small: bool) -> dict[str, Any]:
    query, source = call.sizes[2:]
    return {
        "layer": call.layer,
        "module": call.module,
        "call": call.call,
        "kind": call.kind,
        "heads": [0],
        "queries": query,
        "sources": source,
        "query_axis": call.axes[0],
        "source_axis": call.axes[1],
        "rows": None,
        "offset": source - query if call.kind == "self" else 0,
        "mask": f"mask/0/{index}",
        "check": None,
        "encoding": None,
        "top": 0,
        "cells": 0,
        "sums": False,
        "parts": parts,
        "why": f"why/0/{index}" if small else None,
    }
