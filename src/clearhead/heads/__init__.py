"""heads: the statistics of every attention head of a model, over any amount of text.

>>> import torch
>>> from clearhead import heads, models
>>> survey = heads.measure(models.load(), models.load().vocabulary.encode("hell or shell"))
>>> survey.mean("previous").shape  # (layer, head)
torch.Size([4, 4])
>>> survey.sequences, survey.tokens
(1, 13)

`STATISTICS` holds the statistics by name: `help(heads.STATISTICS["induction"])` has formula, unit
and paper. They are all aggregated by one rule:

    the mean over all query rows that count. A row counts if its token is real (not padding), if it
    may read at least one source, and, for a statistic over certain edges (previous,
    duplicate, induction, precursor), if it has at least one such edge.

A statistic with one value per sequence (sink_rate, received, coverage, overlap) is the mean over
the sequences. Variances are population variances over the same rows or sequences.
"""

from __future__ import annotations

from clearhead.heads.attention_rollout import Rollout, rollout
from clearhead.heads.roles import ROLES, atlas, cut_calls, groups
from clearhead.heads.roles import pooled as pooled
from clearhead.heads.statistics import STATISTICS, Statistic
from clearhead.heads.survey import Survey, TableRow, measure

__all__ = [
    "ROLES",
    "STATISTICS",
    "Rollout",
    "Statistic",
    "Survey",
    "TableRow",
    "atlas",
    "cut_calls",
    "groups",
    "measure",
    "rollout",
]
