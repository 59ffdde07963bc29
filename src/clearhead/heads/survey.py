"""heads: what every attention head of a model does, over as much text as there is.

>>> import torch
>>> from clearhead import heads, models
>>> survey = heads.measure(models.load(), models.load().vocabulary.encode("hell or shell"))
>>> survey.mean("previous").shape  # (layer, head)
torch.Size([4, 4])
>>> survey.sequences, survey.tokens
(1, 13)

`STATISTICS` holds the statistics by name: `help(heads.STATISTICS["induction"])` has formula, unit
and paper. They are all aggregated by one rule:

    the mean over all query rows that count. A row counts if its token is real (no padding), if it
    may read at least one source, and, for a statistic that asks for certain edges (previous,
    duplicate, induction, precursor), if it has at least one such edge.

What has one value for a sequence (sink_rate, received, coverage, overlap) is the mean over the
sequences. Variances are population variances over the same rows or sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._capture import two_sided
from clearhead._core import type_error, value_error
from clearhead.heads.batch import Batch
from clearhead.heads.look import Look
from clearhead.heads.moments import Moments
from clearhead.heads.part import Calls, Layer, Tally, joined
from clearhead.heads.rolling import Rollout, rollout
from clearhead.heads.running import body_of, runner
from clearhead.heads.statistics import STATISTICS, Statistic, readings_for
from clearhead.readings import TopK
from clearhead.recording import Record, Seen, watch

__all__ = [
    "STATISTICS",
    "Rollout",
    "Row",
    "Statistic",
    "Survey",
    "groups",
    "measure",
    "rollout",
]


@dataclass(frozen=True)
class Row:
    """One line of the table of all heads."""

    layer: int  # number of the attention call in the model's forward
    module: str
    head: int
    statistic: str
    unit: str
    count: int
    mean: float
    variance: float | None  # None for a number that is no mean


def measure(
    model: nn.Module,
    tokens: Tensor | Iterable[Tensor],
    *,
    real: Tensor | None = None,
) -> Survey:
    """Take all statistics of every head, over one batch of tokens or many.

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
    padded or not, give the same numbers, as each sequence is counted by itself.
    """

    def __init__(self, model: nn.Module, run: Callable[[Batch], Any] | None = None) -> None:
        self.model = model
        self.tally: Tally | None = None
        self.sequences = self.tokens = 0
        self.notes: list[str] = []
        if run is None and two_sided(model):
            self.notes.append(
                "the encoder alone is read: a decoder attends to what it writes, not to the text"
            )
        self.run = run or runner(model)
        self._body = None if run else body_of(model)
        self._chosen: list[int] | None = None
        self._heads = 0

    def __repr__(self) -> str:
        seen = f"{self.sequences} sequences of together {self.tokens} tokens"
        of = f"{len(self.layers)} layers" if self.layers else "no layers yet"
        return (
            f"{type(self).__name__} of {of}, over {seen}; "
            f"mean(name) and variance(name) of {', '.join(STATISTICS)}"
        )

    @property
    def layers(self) -> list[Layer]:
        """The statistics of each attention call so far."""
        return [] if self.tally is None else self.tally.layers

    def add(self, tokens: Tensor, real: Tensor | None = None) -> None:
        """Run the model on a batch and count what its heads do."""
        batch = Batch(tokens, real)
        some = batch.real.any(-1).cpu()
        if some.any():
            self.count(self.read(batch)[some], int(batch.real.sum()))

    def read(self, batch: Batch) -> Moments:
        """Run the model on a batch; give what each sequence adds, and count nothing yet."""
        if not self._heads:
            self._look(batch)
        look = Look(batch)
        readings = readings_for(look, self._heads)
        calls = Calls(look, list(readings))
        read = tuple(readings.values())

        def keep(record: Record) -> None:
            calls.add(record.module, record.value)

        with torch.no_grad(), watch(self.model, read=read, layers=self._chosen, on_call=keep):
            self.run(batch)
        calls.flush()
        outlines = [part.outline for part in calls.parts]
        if self.tally is None:
            self.tally = Tally(outlines)
        if self.tally.outlines != outlines:
            rule = f"made {len(outlines)} attention calls, and {len(self.tally.outlines)} before"
            raise value_error("model", rule)
        return joined(calls.parts)

    def count(self, moments: Moments, tokens: int) -> None:
        """Add up what `read` gave, sequence by sequence."""
        assert self.tally is not None
        for number in range(len(moments.count)):
            self.tally.add(moments[number])
        self.sequences += len(moments.count)
        self.tokens += tokens

    def _look(self, batch: Batch) -> None:
        """Find the calls in which every position may attend to every other one's source."""
        longest = int(batch.real.sum(-1).argmax())
        one = Batch(batch.tokens[longest][batch.real[longest]])
        fits: dict[int, bool] = {}
        seen = self._seen(self.run, one)
        for record in seen:
            fit = record.kind == "self" and record.sizes[::2] == (1, one.sizes[1])
            fit = fit and record.sizes[3] == one.sizes[1]
            fits[record.layer] = fit and fits.get(record.layer, True)
        self.notes += [note for note in seen.notes if note not in self.notes]
        others = [layer for layer, fit in fits.items() if not fit]
        if len(others) == len(fits):
            rule = "has no self-attention over the positions of the tokens"
            raise value_error("model", rule, got=repr(seen))
        if others:
            self._chosen = [layer for layer, fit in fits.items() if fit]
            self.notes.append(
                f"{len(others)} attention modules are left out: they are no self-attention over "
                "the tokens' positions"
            )
        self._heads = max(record.sizes[1] for record in seen)
        if self._body is not None:
            # Logits are not looked at: where the body makes all calls, the head is left out.
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
        """Whether every head attends to all of its sources alike: a normalized entropy over 0.99.

        So do heads whose weights were never loaded. One row a sequence may have one source only,
        and counts as even.
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
        head that looks the same way whatever it reads, near 1 one whose pattern is all content. It
        is measured among the first 16 positions of each sequence, and NaN before there are two
        sequences. Vig and Belinkov (2019) define it with absolute deviations; squares need one
        pass.
        """
        return [layer.variability() for layer in self.layers]

    def rows(self) -> Iterator[Row]:
        """All numbers as one table, also the overlaps ("overlap.3": with head 3)."""
        for number, layer in enumerate(self.layers):
            variability = layer.variability()
            for head in range(layer.heads):
                place = (number, layer.module, head)
                for at, statistic in enumerate(STATISTICS.values()):
                    moments = layer.statistics[at, head]
                    yield _row(*place, statistic.name, statistic.unit, moments)
                for other in range(layer.heads):
                    if other != head:
                        pair = layer.overlap[head, other]
                        yield _row(*place, f"overlap.{other}", "cosine", pair)
                count = int(layer.corner.count[head].max())
                mean = float(variability[head])
                yield Row(*place, "variability", "share of the squares", count, mean, None)


def _row(layer: int, module: str, head: int, name: str, unit: str, moments: Any) -> Row:
    count = int(moments.count)
    mean = float(moments.mean) if count else float("nan")
    variance = float(moments.variance) if count else float("nan")
    return Row(layer, module, head, name, unit, count, mean, variance)


def groups(overlap: Tensor, threshold: float = 0.9) -> list[list[int]]:
    """Group the heads of a layer that look alike: those with a cosine of at least `threshold`.

    >>> overlap = torch.tensor([[1.0, 0.1, 0.95], [0.1, 1.0, 0.2], [0.95, 0.2, 1.0]])
    >>> groups(overlap)
    [[0, 2]]

    A group holds all heads that a chain of such pairs connects; heads like no other are left out.
    """
    if not isinstance(overlap, torch.Tensor):
        got, hint = type(overlap).__name__, "groups(survey.overlap[layer]) takes one layer"
        raise type_error("overlap", "is a tensor, (head, head)", got=got, hint=hint)
    left, found = set(range(len(overlap))), []
    while left:
        group, fresh = set(), {min(left)}
        while fresh:
            group |= fresh
            near = {j for i in fresh for j in left if overlap[i, j] >= threshold}
            fresh = near - group
        left -= group
        if len(group) > 1:
            found.append(sorted(group))
    return found
