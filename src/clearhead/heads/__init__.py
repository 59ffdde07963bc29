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

from clearhead.heads.roles import ROLES as ROLES
from clearhead.heads.roles import atlas as atlas
from clearhead.heads.survey import (
    STATISTICS,
    Rollout,
    Row,
    Statistic,
    Survey,
    groups,
    measure,
    rollout,
)

__all__ = ["STATISTICS", "Rollout", "Row", "Statistic", "Survey", "groups", "measure", "rollout"]
