"""The survey: the statistics of every head, added up over batches of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._capture import two_sided
from clearhead._core import value_error
from clearhead._display import mimebundle
from clearhead.heads.batch import Batch
from clearhead.heads.calls import PendingCalls
from clearhead.heads.layer_moments import LayerStatistics, Totals, joined
from clearhead.heads.map_summary import MapSummary
from clearhead.heads.moments import Moments
from clearhead.heads.runner import body_runner, runner
from clearhead.heads.statistics import STATISTICS, readings_for
from clearhead.readings import TopK
from clearhead.recording import Record, Seen, watch

__all__ = ["Survey", "TableRow", "measure"]


@dataclass(frozen=True)
class TableRow:
    """One line of the table of all heads."""

    layer: int  # number of the attention call in the model's forward
    module: str
    head: int
    statistic: str
    unit: str
    count: int
    mean: float
    variance: float | None  # None for a number that is not a mean


def measure(
    model: nn.Module,
    tokens: Tensor | Iterable[Tensor],
    *,
    real: Tensor | None = None,
) -> Survey:
    """Compute all statistics of every head, over one batch of tokens or many.

    `tokens` is (batch, position) or (position,), or an iterable of such batches. `real`, for one
    batch, is True for tokens and False for padding, which never counts.
    """
    survey = Survey(model)
    if isinstance(tokens, Tensor):
        survey.add(tokens, real)
        return survey
    if real is not None:
        hint = "Survey(model).add(tokens, real) for each batch"
        raise value_error("real", "goes with one batch of tokens", hint=hint)
    for batch in tokens:
        survey.add(batch)
    return survey


class Survey:
    """The statistics of every head of a model, added up over any number of batches.

    `layers` are the attention calls of the model's forward, in their order. Batches of any size,
    padded or not, give the same numbers, since each sequence is counted on its own.
    """

    def __init__(self, model: nn.Module, run: Callable[[Batch], Any] | None = None) -> None:
        self.model = model
        self.totals: Totals | None = None
        self.sequences = self.tokens = 0
        self.notes: list[str] = []
        if run is None and two_sided(model):
            self.notes.append(
                "the encoder alone is read: a decoder attends to what it writes, not to the text"
            )
        self.run = run or runner(model)
        self._body = None if run else body_runner(model)
        self._chosen: list[int] | None = None
        self._heads = 0

    def __repr__(self) -> str:
        counts = f"{self.sequences} sequences, {self.tokens} tokens"
        of = f"{len(self.layers)} layers" if self.layers else "no layers yet"
        return (
            f"{type(self).__name__} of {of}, over {counts}; "
            f"mean(name) and variance(name) of {', '.join(STATISTICS)}"
        )

    _repr_mimebundle_ = mimebundle

    @property
    def layers(self) -> list[LayerStatistics]:
        """The statistics of each attention call so far."""
        return [] if self.totals is None else self.totals.layers

    def add(self, tokens: Tensor, real: Tensor | None = None) -> None:
        """Run the model on a batch and count what its heads do."""
        batch = Batch(tokens, real)
        some = batch.real.any(-1).cpu()
        if some.any():
            self.count(self.read(batch)[some], int(batch.real.sum()))

    def read(self, batch: Batch) -> Moments:
        """Run the model on a batch; return what each sequence adds, and count nothing yet."""
        if not self._heads:
            self._choose(batch)
        summary = MapSummary(batch)
        readings = readings_for(summary, self._heads)
        calls = PendingCalls(summary, list(readings))
        read = tuple(readings.values())

        def keep(record: Record) -> None:
            calls.add(record.module, record.value)

        with torch.no_grad(), watch(self.model, read=read, layers=self._chosen, on_call=keep):
            self.run(batch)
        calls.flush()
        outlines = [layer.outline for layer in calls.layers]
        if self.totals is None:
            self.totals = Totals(outlines)
        if self.totals.outlines != outlines:
            rule = f"made {len(outlines)} attention calls, and {len(self.totals.outlines)} before"
            raise value_error("model", rule)
        return joined(calls.layers)

    def count(self, moments: Moments, tokens: int) -> None:
        """Add up what `read` returned, sequence by sequence."""
        assert self.totals is not None
        for number in range(len(moments.count)):
            self.totals.add(moments[number])
        self.sequences += len(moments.count)
        self.tokens += tokens

    def _choose(self, batch: Batch) -> None:
        """Choose the calls that are self-attention over all positions, from one sequence."""
        longest = int(batch.real.sum(-1).argmax())
        one = Batch(batch.tokens[longest][batch.real[longest]])
        seen = self._seen(self.run, one)
        self.notes += [note for note in seen.notes if note not in self.notes]
        fits = _fitting(seen, one.sizes[1])
        if not any(fits.values()):
            rule = "has no self-attention over the positions of the tokens"
            raise value_error("model", rule, got=repr(seen))
        if others := sum(not fit for fit in fits.values()):
            self._chosen = [layer for layer, fit in fits.items() if fit]
            self.notes.append(
                f"{others} attention modules are left out: they are no self-attention over "
                "the tokens' positions"
            )
        if any(len(record.heads) < record.sizes[1] for record in seen):
            hint = "watch(model) on every rank, and distributed.gather(seen)"
            got = f"{len(seen[0].heads)} of {seen[0].sizes[1]}"
            raise value_error(
                "model", "has all heads of a layer in this process", got=got, hint=hint
            )
        self._heads = max(record.sizes[1] for record in seen)
        if self._body is not None:
            # Logits are not read: where the body makes all calls, the head of the model is skipped.
            calls = [[(r.module, r.sizes) for r in s] for s in (seen, self._seen(self._body, one))]
            self.run = self._body if calls[0] == calls[1] else self.run

    def _seen(self, run: Callable[[Batch], Any], batch: Batch) -> Seen:
        with torch.no_grad(), watch(self.model, read=TopK(1)) as seen:
            run(batch)
        return seen

    def mean(self, statistic: str) -> Tensor:
        """The means of one statistic, (layer, head); NaN where a layer has fewer heads."""
        return self._each(
            statistic, lambda moments: moments.mean.where(moments.count > 0, torch.nan)
        )

    def variance(self, statistic: str) -> Tensor:
        """The variances of one statistic, (layer, head)."""
        return self._each(statistic, lambda moments: moments.variance)

    def _each(self, statistic: str, of: Callable[[Any], Tensor]) -> Tensor:
        if statistic not in STATISTICS:
            raise value_error(
                "statistic", "is not known", got=repr(statistic), hint=", ".join(STATISTICS)
            )
        if not self.layers:
            raise value_error("tokens", "held no real token so far: there is nothing to average")
        at = list(STATISTICS).index(statistic)
        rows = [of(layer.statistics[at]) for layer in self.layers]
        most = max((len(row) for row in rows), default=0)
        pad = torch.nn.functional.pad
        return torch.stack([pad(row, (0, most - len(row)), value=torch.nan) for row in rows])

    @property
    def looks_untrained(self) -> bool:
        """Whether every head attends uniformly: a normalized entropy above 0.99.

        Heads whose weights were never loaded do so. One row of each sequence may have a single
        source; it counts as uniform.
        """
        even = self._each(
            "entropy_normalized", lambda m: m.mean + self.sequences / m.count.clamp(min=1)
        )
        return bool(even.nan_to_num(1.0).min() > 0.99)

    @property
    def overlap(self) -> list[Tensor]:
        """For each layer the mean cosine between the maps of its heads, (head, head)."""
        return [layer.overlap.mean for layer in self.layers]

    @property
    def variability(self) -> list[Tensor]:
        """For each layer, how much of each head's pattern depends on more than position, (head,).

        1 - sum_ij m_ij^2 / sum_ij E[w_ij^2], where m is the mean map over the sequences: 0 is a
        head whose map is the same for every text, near 1 one whose map is all content. It is
        measured over the first 16 positions of each sequence, and is NaN for fewer than two
        sequences. Vig and Belinkov (2019) define it with absolute deviations; squares need a
        single pass.
        """
        return [layer.variability() for layer in self.layers]

    def rows(self) -> Iterator[TableRow]:
        """All numbers as one table, also the overlaps ("overlap.3": with head 3)."""
        return rows_of(self.layers)


def rows_of(layers: Sequence[LayerStatistics]) -> Iterator[TableRow]:
    """All numbers of the layers of a model as one table."""
    for number, layer in enumerate(layers):
        variability = layer.variability()
        for head in range(layer.heads):
            yield from _rows(number, layer, head, float(variability[head]))


def _fitting(seen: Seen, position: int) -> dict[int, bool]:
    """Which layers attend from every position of one sequence to the sources of all of them."""
    fits: dict[int, bool] = {}
    for record in seen:
        batch, _, query, source = record.sizes
        fit = record.kind == "self" and (batch, query, source) == (1, position, position)
        fits[record.layer] = fit and fits.get(record.layer, True)
    return fits


def _rows(number: int, layer: LayerStatistics, head: int, variability: float) -> Iterator[TableRow]:
    """The rows of one head: statistics, overlaps, variability."""
    place = (number, layer.module, head)
    for at, statistic in enumerate(STATISTICS.values()):
        yield _row(*place, statistic.name, statistic.unit, layer.statistics[at, head])
    for other in range(layer.heads):
        if other != head:
            yield _row(*place, f"overlap.{other}", "cosine", layer.overlap[head, other])
    count = int(layer.corner.count[head].max())
    yield TableRow(*place, "variability", "share of the squares", count, variability, None)


def _row(layer: int, module: str, head: int, name: str, unit: str, moments: Moments) -> TableRow:
    count = int(moments.count)
    mean = float(moments.mean) if count else float("nan")
    variance = float(moments.variance) if count else float("nan")
    return TableRow(layer, module, head, name, unit, count, mean, variance)
