"""The page of attention calls: header, chunks, and what is left out of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clearhead._core import value_error, warn
from clearhead.masks import Mask
from clearhead.views.content.chunks import PageContent
from clearhead.views.content.layers import CELLS, EXACT, LONG, MOST, TOP, LayerContent, MapPlan
from clearhead.views.content.maps import MapLayer
from clearhead.views.content.reasons import reasons_of
from clearhead.views.content.statistics import statistics_of, table_of
from clearhead.views.page import codes

__all__ = ["RecordContent", "check_size"]

SCHEMA, VERSION = "clearhead.view", 1
# Bytes of numbers that a file holds at most: browsers are slow to open larger ones.
CAP = 256_000_000


class RecordContent:
    """Makes a page of records; `shown` says what is shown, `live` that rows can be asked for."""

    def __init__(self, shown: Any, live: bool) -> None:
        self.shown, self.live = shown, live
        layers = shown.layers + (() if shown.other is None else shown.other.layers)
        self.plan = MapPlan(_numbers(layers), live)
        self.layers = _contents(shown.layers, self.plan)
        self.others = [] if shown.other is None else _contents(shown.other.layers, self.plan)

    def content(self) -> PageContent:
        """The header, with what makes each chunk."""
        shown = self.shown
        makers = {name: make for one in self.layers for name, make in one.makers().items()}
        for one in self.others:
            makers |= one.makers("other/")
        statistics = statistics_of(shown.layers, shown.token_numbers, shown.segments)
        batch = max((x.sizes.batch for x in shown.layers), default=1)
        if statistics:
            heads = max(x.sizes.head for x in shown.layers)
            columns = [values for _, values in statistics.values()]
            makers["statistics"] = lambda: table_of(columns, batch, heads)
        axes = [axis.entry() for axis in shown.axes]
        entries = [x.entry() for x in self.layers]
        reasons = reasons_of([(x.layer.mask, x.layer.sizes) for x in self.layers], self.live)
        for entry, parts in zip(entries, reasons.parts, strict=True):
            entry["parts"] = parts
        header = {
            "schema": SCHEMA,
            "version": VERSION,
            "kind": "attention",
            "title": shown.title,
            "made_by": shown.made_by,
            "notes": list(shown.notes),
            "holds": self.holds(),
            "samples": batch,
            "axes": axes,
            "layers": entries,
            "statistics": [entry for entry, _ in statistics.values()],
            "effects": list(shown.effects),
            "chunks": {},
            "live": self.live,
        }
        if shown.other is not None:
            header["other"] = self._other(axes)
        return PageContent(header, makers | reasons.makers, self._asked() | reasons.asked)

    def holds(self) -> list[str]:
        """Say what is held, and what is left out."""
        layers = [x.layer for x in (*self.layers, *self.others)]
        if self.live:
            return _live_words(layers)
        return _whole_words(self.plan) + _list_words(layers)

    def bytes(self) -> int:
        """About how many bytes of numbers a file holds."""
        return sum(self.plan.bytes_of(x.layer) for x in (*self.layers, *self.others))

    def _other(self, axes: list[dict[str, Any]]) -> dict[str, Any]:
        """The record that is compared; labels of its own are further axes."""
        other, (name, other_name) = self.shown.other, self.shown.names
        own = [axis.labels for axis in other.axes] == [axis.labels for axis in self.shown.axes]
        first = 0 if own else len(axes)
        if not own:
            axes += [
                {**axis.entry(), "name": f"{axis.name} of {other_name}"} for axis in other.axes
            ]
        layers = []
        for one in self.others:
            query, source = one.layer.axes
            layers.append(one.entry((first + query, first + source)))
        return {"title": other.title, "name": name, "other_name": other_name, "layers": layers}

    def _asked(self) -> dict[str, Callable[..., bytes]]:
        if not self.live:
            return {}
        return {
            f"{prefix}{word}": _asking(layers, word)
            for prefix, layers in (("", self.layers), ("other/", self.others))
            for word in ("row", "column")
        }


def check_size(record: RecordContent) -> None:
    """Refuse a file above the cap, and announce what is left out, before anything is computed."""
    expected, plan = record.bytes(), record.plan
    hint = "fewer layers= and heads= in watch(), one sample, or view(...).serve() for all of it"
    if expected > CAP:
        rule = f"fits into a file of {CAP // 1_000_000} MB"
        raise value_error("seen", rule, got=f"about {expected // 1_000_000:,} MB", hint=hint)
    if plan.cut:
        rule = f"has {plan.total:,} weights, and a file holds {MOST:,}: the {TOP} largest of each"
        rule += f" query and {CELLS} tiles a side are kept"
        warn("seen", rule, hint=hint)


def _asking(layers: list[LayerContent], word: str) -> Callable[..., bytes]:
    def ask(sample: int, index: int, head: int, position: int) -> bytes:
        one = layers[index]
        if one.layer.weights is None:
            raise LookupError("this record holds no whole rows")
        return getattr(one, word)(sample, head, position)

    return ask


def _contents(layers: Sequence[MapLayer], plan: MapPlan) -> list[LayerContent]:
    """Each call with the chunk of its mask, which is that of the first call with the same one."""
    known: list[tuple[Mask, Any, str]] = []
    made = []
    for index, layer in enumerate(layers):
        name = None
        if layer.mask is not None:
            name = next((n for m, s, n in known if s == layer.sizes and m == layer.mask), None)
            if name is None:
                name = f"mask/0/{index}"
                known.append((layer.mask, layer.sizes, name))
        made.append(LayerContent(layer, index, plan, name))
    return made


def _numbers(layers: Sequence[MapLayer]) -> int:
    return sum(x.weights.numel() for x in layers if x.weights is not None)


def _whole_words(plan: MapPlan) -> list[str]:
    total = plan.total
    if not total:
        return []
    if plan.cut:
        return [
            f"The {TOP} largest weights of each query, and {CELLS} tiles a side: the {total:,} "
            f"weights of all maps are more than the {MOST:,} that a file holds. "
            "To see all: fewer layers= and heads= in watch(), or the page served "
            "(view(...).serve(), clearhead view RECORD --serve)."
        ]
    return [f"{total:,} weights in full{', to 2.2%' if total > EXACT else ''}."]


def _list_words(layers: list[MapLayer]) -> list[str]:
    held, lists = [], [x for x in layers if x.weights is None and x.top is not None]
    if lists:
        held.append("The largest weights of each query; the others are given together.")
        if any(x.sizes.query > LONG for x in lists):
            held.append(codes.COARSELY)
    if any(x.weights is None and x.blocks is not None for x in layers):
        held.append("The mean and the largest weight of each tile of the map.")
    return held


def _live_words(layers: list[MapLayer]) -> list[str]:
    total = _numbers(layers)
    held = [f"All {total:,} weights, exactly; each is sent when it is looked at."] if total else []
    if any(x.weights is None and x.top is not None for x in layers):
        held.append(
            "The record holds the largest weights of each query, and these are all there is: other "
            "weights were not saved."
        )
    if any(x.weights is None and x.blocks is not None for x in layers):
        held.append("The mean and the largest weight of each tile of the map.")
    return held
