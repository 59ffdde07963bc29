"""The statistics of a head, in the field's terms: formula, unit and paper of each.

w_ij is the weight that query i puts on source j. Every statistic is aggregated by one rule:

    the mean over all query rows that count. A row counts if its token is real (not padding), if it
    may read at least one source, and, for a statistic over certain edges (previous, duplicate,
    induction, ...), if it has at least one such edge.

So the row of a first token does not enter the previous-token score as a zero: it does not count,
since it has no previous token. A statistic with one value per sequence (sink rate, received,
coverage, overlap) is the mean over the sequences with a row that counts. Count and variance are
taken over the same rows or sequences.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from clearhead.heads.edge_sets import EDGE_SETS
from clearhead.heads.map_summary import MapSummary, MapValues
from clearhead.heads.moments import Moments
from clearhead.readings import Distance, Entropy, Reading, TopK, TopKValue, Weights

__all__ = ["STATISTICS", "CallValues", "Statistic", "moments_of", "readings_for"]

# Gu et al. call a source a sink where its mean weight is above this.
SINK_THRESHOLD = 0.3
# Maps of up to so many numbers are read whole; larger ones are summarized in strips.
WHOLE = 1 << 24
# The parentheses of a docstring that name a paper by its year.
_PAPERS = re.compile(r"\s*:? ?\(((?:[^()]*\b(?:19|20)\d\d\b)[^()]*)\)")


class CallValues:
    """What was read of one call: the values of the readings by name, and which rows count."""

    def __init__(self, summary: MapSummary, read: dict[str, object]) -> None:
        self.batch, top = summary.batch, read["top"]
        assert isinstance(top, TopKValue)
        whole = read.get("weights")
        found = summary.of(whole) if isinstance(whole, Tensor) else read["summary"]
        assert isinstance(found, MapValues)
        masses = dict(zip(EDGE_SETS, found.masses, strict=True))
        self.read = {**read, **found._asdict(), **masses}
        self.largest = top.weights[..., 0]
        # (batch, head, query): real, and not empty
        self.rows = (top.sources[..., 0] >= 0) & self.batch.real[:, None]

    def __getitem__(self, name: str) -> Tensor:
        value = self.read[name]
        assert isinstance(value, Tensor)
        return value

    def once(self, value: Tensor, *, also: Tensor | None = None) -> Moments:
        """Count one value (batch, head) for each sequence that has a row that counts."""
        some = self.rows.any(-1)
        some = some if also is None else some & also
        return Moments.of(value.unsqueeze(-1), some.unsqueeze(-1))


def readings_for(summary: MapSummary, heads: int) -> dict[str, Reading]:
    """The readings that the statistics need of a call, by name."""
    batch, position = summary.batch.sizes
    small = batch * heads * position**2 <= WHOLE
    return {
        "top": TopK(1),
        "entropy": Entropy(),
        "normalized": Entropy(normalized=True),
        "distance": Distance(),
        **({"weights": Weights()} if small else {"summary": summary}),
    }


class Statistic:
    """One number for each head and each row that counts, or for each head and sequence."""

    name: str
    unit = "share of the row"

    @property
    def definition(self) -> str:
        """The first sentences of the docstring, without the papers; empty under `python -OO`."""
        words = " ".join((type(self).__doc__ or "").split("\n\n")[0].split())
        return _PAPERS.sub("", words).rstrip(" .:") + "." if words else ""

    @property
    def paper(self) -> str:
        """The papers that the docstring names; empty where the statistic needs none."""
        words = " ".join((type(self).__doc__ or "").split())
        return "; ".join(match[1] for match in _PAPERS.finditer(words))

    def value(self, values: CallValues) -> Tensor:
        """One value for each query, (batch, head, query)."""
        return values[self.name]

    def counted(self, values: CallValues) -> Tensor:
        """Which of them count."""
        return values.rows


class SequenceStatistic(Statistic):
    """One number for each head and sequence."""

    def of(self, values: CallValues) -> Moments:
        """Count, mean and variance, (batch, head)."""
        raise NotImplementedError


class RowEntropy(Statistic):
    """How spread the weights are: H_i = -sum_j w_ij ln w_ij, in nats.

    A low entropy in training indicates a head that collapses (Zhai et al. 2023, "Stabilizing
    Transformer Training by Preventing Attention Entropy Collapse").
    """

    unit = "nats"
    name = "entropy"


class NormalizedEntropy(Statistic):
    """Entropy over the largest that the mask lets the row have: H_i / ln n_i, from 0 to 1.

    n_i is the number of sources that row i may read; a row with one source has 0. A head that stays
    above 0.99 everywhere attends uniformly, as an untrained one does.
    """

    unit = "share of the largest"
    name = "entropy_normalized"

    def value(self, values: CallValues) -> Tensor:
        return values["normalized"]


class LargestWeight(Statistic):
    """The largest weight of a row: max_j w_ij (Voita et al. 2019, "Analyzing Multi-Head
    Self-Attention: Specialized Heads Do the Heavy Lifting, the Rest Can Be Pruned").
    """

    name = "confidence"

    def value(self, values: CallValues) -> Tensor:
        return values.largest


class MeanDistance(Statistic):
    """The mean distance of a row: sum_j w_ij |i - j|, in positions (Vig and Belinkov 2019,
    "Analyzing the Structure of Attention in a Transformer Language Model").
    """

    unit = "positions"
    name = "distance"


class OwnPosition(Statistic):
    """The weight on the query's own position: w_ii."""

    name = "self"


class PreviousToken(Statistic):
    """The weight on the position before: w_i,i-1: the previous-token score (Olsson et al. 2022,
    "In-context Learning and Induction Heads"; Voita et al. 2019).
    """

    name = "previous"

    def counted(self, values: CallValues) -> Tensor:
        at = torch.arange(values.batch.sizes[1], device=values.rows.device)
        return values.rows & (at > values.batch.start[:, None])[:, None]


class DuplicateToken(Statistic):
    """The weight on earlier occurrences of the query's own token: sum over j < i with t_j = t_i
    (Wang et al. 2022, "Interpretability in the Wild").
    """

    name = "duplicate"

    def counted(self, values: CallValues) -> Tensor:
        return values.rows & (values.batch.before >= 0)[:, None]


class InductionScore(DuplicateToken):
    """The weight on the tokens that came after earlier occurrences of the query's token: sum over
    j <= i with t_j-1 = t_i (Olsson et al. 2022, "In-context Learning and Induction Heads": their
    prefix-matching score).

    "[A] [B] ... [A] ->" attends to [B], which is what an induction head predicts.
    """

    name = "induction"


class PrecursorToken(Statistic):
    """The weight on the tokens that came *before* earlier occurrences of the query's token: sum
    over j < i - 1 with t_j+1 = t_i.

    Some texts call this induction as well, although it is not what an induction head does. The
    separate name keeps the two apart.
    """

    name = "precursor"

    def counted(self, values: CallValues) -> Tensor:
        batch = values.batch
        return values.rows & (batch.before > batch.start[:, None])[:, None]


class SinkMass(Statistic):
    """The weight on the first token: w_i0, the sink mass (Xiao et al. 2023, "Efficient Streaming
    Language Models with Attention Sinks"). With padding on the left, on the first real token.
    """

    name = "sink"


class SinkRate(SequenceStatistic):
    """The share of sequences in which the head has a sink: those where the mean over the rows of
    w_i0 is above 0.3 (Gu et al. 2024, "When Attention Sink Emerges in Language Models").

    Their sink rate of a model is the mean of this over all heads.
    """

    unit = "share of sequences"
    name = "sink_rate"

    def of(self, values: CallValues) -> Moments:
        mean = Moments.of(values["sink"], values.rows).mean
        # NaN must propagate: compared with the threshold it would read as "no sink".
        return values.once(torch.where(mean.isnan(), mean, (mean > SINK_THRESHOLD).double()))


class LocalMass(Statistic):
    """The weight within 8 positions on either side: sum over |i - j| <= 8 (local attention, as in
    Child et al. 2019, "Generating Long Sequences with Sparse Transformers").
    """

    name = "local"


class LargestReceived(SequenceStatistic):
    """The share of a sequence's whole weight that its most-read source receives:
    max_j sum_i w_ij / sum_ij w_ij (the heavy hitters of Zhang et al. 2023, "H2O").

    1/T is uniform; near 1 nearly all rows read the same source, wherever it stands.
    """

    unit = "share of the sequence"
    name = "received"

    def of(self, values: CallValues) -> Moments:
        received, total = values["received"], values["received"].sum(-1)
        share = received.amax(-1) / total.where(total > 0, 1)
        return values.once(share, also=total > 0)


class Coverage(SequenceStatistic):
    """The share of sources that are read: the mean over real j of min(1, sum_i w_ij) (the coverage
    of Tu et al. 2016 and Wu et al. 2016, "Google's Neural Machine Translation System").

    1 where every source receives at least the weight of one whole row.
    """

    unit = "share of the sources"
    name = "coverage"

    def of(self, values: CallValues) -> Moments:
        real = values.batch.real[:, None].expand_as(values["received"])
        return values.once(Moments.of(values["received"].clamp(max=1), real).mean)


STATISTICS: dict[str, Statistic] = {
    statistic.name: statistic
    for statistic in (
        RowEntropy(), NormalizedEntropy(), LargestWeight(), MeanDistance(), OwnPosition(),
        PreviousToken(), DuplicateToken(), InductionScore(), PrecursorToken(), SinkMass(),
        SinkRate(), LocalMass(), LargestReceived(), Coverage(),
    )
}  # fmt: skip


def moments_of(values: CallValues) -> Moments:
    """All statistics of one call, (statistic, batch, head), in the order of `STATISTICS`."""
    by_row = [s for s in STATISTICS.values() if not isinstance(s, SequenceStatistic)]
    # All at once: one small sum per statistic would take as long as the attention itself.
    each = Moments.of(
        torch.stack([statistic.value(values) for statistic in by_row]),
        torch.stack([statistic.counted(values) for statistic in by_row]),
    )
    found = {statistic.name: each[number] for number, statistic in enumerate(by_row)}
    for statistic in STATISTICS.values():
        if isinstance(statistic, SequenceStatistic):
            found[statistic.name] = statistic.of(values)
    return Moments.stack([found[name] for name in STATISTICS])
