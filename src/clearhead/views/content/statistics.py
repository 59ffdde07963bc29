"""The statistics of each head that a page sorts by, from the maps or from readings beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead import masks
from clearhead.heads import STATISTICS
from clearhead.readings import Entropy, Mass, Overlap
from clearhead.views.content.maps import MapLayer

__all__ = ["Segment", "about", "look_untrained", "statistics_of", "table_of"]

# Those of `STATISTICS` that a page computes for one text, in this order, and the likeness of heads.
NAMES = ("entropy", "entropy_normalized", "confidence", "sink", "previous", "self", "induction")
OVERLAP = {
    "name": "overlap",
    "label": "overlap",
    "unit": "cosine",
    "definition": "The largest cosine between the head's map and that of another head of its layer",
    "paper": "",
}
# The normalized entropy above which a head attends evenly, and the rows it takes to tell.
EVEN, ROWS = 0.99, 4
# More segments have too many pairs to be statistics of each head.
SEGMENTS = 4

Segment = tuple[int, int, str]


class Texts(NamedTuple):
    """What the statistics know of the texts: token numbers a sample, and named segments."""

    tokens: Sequence[list[list[Any]] | None]  # one an axis
    segments: Sequence[Segment]  # of the first axis


def about(name: str) -> dict[str, str]:
    """The entry of a statistic in the header of a page."""
    if name == "overlap":
        return OVERLAP
    if name not in STATISTICS:
        return {"name": name, "label": name, "unit": "", "definition": "", "paper": ""}
    known = STATISTICS[name]
    return {
        "name": name,
        "label": name.replace("_", " "),
        "unit": known.unit,
        "definition": known.definition,
        "paper": known.paper,
    }


def statistics_of(
    layers: Sequence[MapLayer],
    tokens: Sequence[list[list[Any]] | None],
    segments: Sequence[Segment],
) -> dict[str, tuple[dict[str, str], list[Tensor | None]]]:
    """Each statistic that is known of some call: its entry, and (sample, head) of every call."""
    texts = Texts(tokens, segments)
    found: dict[str, tuple[dict[str, str], list[Tensor | None]]] = {}
    for index, layer in enumerate(layers):
        for entry, value in _of_layer(layer, texts):
            none: list[Tensor | None] = [None] * len(layers)
            found.setdefault(entry["name"], (entry, none))[1][index] = value
    ordered = [*NAMES, "overlap"]
    return dict(sorted(found.items(), key=lambda x: (*ordered, x[0]).index(x[0])))


def table_of(columns: Sequence[Sequence[Tensor | None]], batch: int, heads: int) -> bytes:
    """Write statistics as float32, (statistic, sample, call, head), NaN where there is none."""
    calls = len(columns[0]) if columns else 0
    table = torch.full((len(columns), batch, calls, heads), torch.nan)
    for n, column in enumerate(columns):
        for index, value in enumerate(column):
            if value is not None:
                table[n, : value.shape[0], index, : value.shape[1]] = value
    return table.numpy().astype("<f4").tobytes()


def look_untrained(layers: Sequence[MapLayer]) -> bool:
    """Whether every head attends evenly, as heads do whose weights were never loaded."""
    even = [_evenness(layer) for layer in layers]
    return bool(layers) and all(each is not None and bool((each > EVEN).all()) for each in even)


def _of_layer(layer: MapLayer, texts: Texts) -> Iterator[tuple[dict[str, str], Tensor]]:
    if layer.rows is not None:
        return
    if layer.weights is None:
        yield from ((about(name), value) for name, value in _of_readings(layer, texts))
    elif layer.weights.numel():
        rows = MapRows(layer, layer.weights)
        found = rows.statistics(texts.tokens[layer.axes[1]])
        yield from ((about(name), value) for name, value in found)
        if layer.axes == (0, 0) and 1 < len(texts.segments) <= SEGMENTS:
            yield from rows.between(texts.segments)


@dataclass(frozen=True)
class MapRows:
    """The rows of whole maps; a row counts where it reads something."""

    layer: MapLayer
    weights: Tensor

    def statistics(self, tokens: list[list[Any]] | None) -> Iterator[tuple[str, Tensor]]:
        """Each statistic of `NAMES` that can be told, (sample, head)."""
        weights = self.weights
        entropy = torch.special.entr(weights).sum(-1)
        yield "entropy", self.mean(entropy)
        yield "entropy_normalized", self.mean(_share(entropy, _allowed(self.layer, weights)))
        yield "confidence", self.mean(weights.amax(-1))
        yield "sink", self.mean(weights[..., 0])
        if self.layer.kind == "self":
            back = self.layer.sizes.source - self.layer.sizes.query
            for name, distance in (("previous", 1), ("self", 0)):
                diagonal = weights.diagonal(back - distance, -2, -1)
                if diagonal.shape[-1]:
                    late = slice(weights.shape[-2] - diagonal.shape[-1], None)
                    yield name, self.mean(diagonal, late)
            if tokens is not None and back == 0:
                yield "induction", self.induction(tokens)
        if weights.shape[1] > 1:
            yield "overlap", _likeness(torch.nn.functional.normalize(weights.flatten(2), dim=-1))

    def mean(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """Average values of rows, (sample, head, row), over those that read something."""
        counts = (self.weights[..., rows, :] > 0).any(-1) | values.isnan()
        return (values * counts).sum(-1) / counts.sum(-1)

    def induction(self, tokens: list[list[Any]]) -> Tensor:
        """The weight on what came after earlier occurrences, over the rows with such an edge."""
        numbers = {token: n for n, token in enumerate({t for text in tokens for t in text})}
        ids = torch.tensor([[numbers[token] for token in text] for text in tokens])
        # Edge (i, j): token j - 1 is token i, and j - 1 lies before i.
        same = torch.nn.functional.pad(ids[:, :, None] == ids[:, None, :-1], (1, 0))[:, None].tril()
        counts = same.any(-1)
        return (self.weights * same).sum(-1).sum(-1) / counts.sum(-1)

    def between(self, segments: Sequence[Segment]) -> Iterator[tuple[dict[str, str], Tensor]]:
        """The weight from the queries of one segment to the sources of another."""
        offset = self.layer.sizes.source - self.layer.sizes.query
        for start, stop, name in segments:
            rows = slice(max(start - offset, 0), max(stop - offset, 0))
            for from_, to, other in segments:
                value = self.mean(self.weights[..., rows, from_:to].sum(-1), rows)
                label = f"{name} → {other}"
                words = f"The mean weight that a query of “{name}” puts on all of “{other}”"
                entry = {"name": f"segment {label}", "label": label, "unit": "share of the row"}
                yield {**entry, "definition": words, "paper": ""}, value


def _of_readings(layer: MapLayer, texts: Texts) -> Iterator[tuple[str, Tensor]]:
    """Statistics that were read beside the largest weights."""
    edges = {"sink": masks.first(1), "previous": masks.diagonal(1), "self": masks.diagonal(0)}
    for reading, value in layer.read:
        if isinstance(reading, Entropy):
            value = value.cpu()
            if not reading.normalized:
                yield "entropy", value.mean(-1)
            share = value if reading.normalized else _share(value, _readable(layer))
            yield "entropy_normalized", share.mean(-1)
        elif isinstance(reading, Overlap) and value.shape[-1] > 1:
            yield "overlap", _largest_other(value.cpu())
        elif isinstance(reading, Mass):
            for name, mask in edges.items():
                if reading.edges == mask:
                    first = int(name == "previous" and layer.sizes.query == layer.sizes.source)
                    yield name, value[..., first:].mean(-1).cpu()


def _allowed(layer: MapLayer, weights: Tensor) -> Tensor:
    """How many sources each query may read; without a mask, those that have a weight."""
    return (weights > 0).sum(-1) if layer.mask is None else _readable(layer)


def _readable(layer: MapLayer) -> Tensor:
    """How many sources each query may read, (sample or 1, head or 1, query)."""
    if layer.mask is None:
        return torch.full((1, 1, layer.sizes.query), layer.sizes.source)
    counts = layer.mask.counts(*layer.sizes[2:], batch=layer.sizes.batch)
    return counts if counts.dim() == 3 else counts[None, None]


def _share(entropy: Tensor, allowed: Tensor) -> Tensor:
    return entropy / allowed.clamp(min=2).log()


def _evenness(layer: MapLayer) -> Tensor | None:
    """The normalized entropy of each head over the rows that choose; None where few do."""
    if layer.rows is not None:
        return None
    if layer.weights is not None:
        allowed = _allowed(layer, layer.weights)
        choose = (allowed > 1).expand(layer.weights.shape[:-1])
        share = _share(torch.special.entr(layer.weights).sum(-1), allowed)
        several = bool((choose.sum(-1) >= ROWS).all())
        return (share * choose).sum(-1) / choose.sum(-1) if several else None
    for reading, value in layer.read:
        if isinstance(reading, Entropy) and value.shape[-1] > ROWS:
            share = value.cpu() if reading.normalized else _share(value.cpu(), _readable(layer))
            return share[..., 1:].mean(-1)
    return None


def _likeness(maps: Tensor) -> Tensor:
    return _largest_other(maps @ maps.transpose(-2, -1))


def _largest_other(cosines: Tensor) -> Tensor:
    alone = torch.eye(cosines.shape[-1], dtype=torch.bool)
    return cosines.masked_fill(alone, -1).amax(-1)
