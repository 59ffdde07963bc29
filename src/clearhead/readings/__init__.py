"""What attention returns beside the context: each reading is a fold over pieces of the weight map.

>>> import torch
>>> from clearhead import readings
>>> scores = torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0, -torch.inf]])
>>> readings.Entropy().fold([readings.Strip.of(scores)])
tensor([0.8324, 0.6931])

The pieces may be rows, chunks of sources (a KV cache, the shards of ranks) or both, in any order.
What they need in common is the log-sum-exp of the *whole* rows, which is the `torch.logaddexp` of
the chunks' own; `Strip.of` weighs a piece with it, `part` reads the piece, `merge` adds parts:

>>> left, right = scores[:, :2], scores[:, 2:]
>>> lse = torch.logaddexp(left.logsumexp(-1), right.logsumexp(-1))
>>> whole = {"lse": lse, "query": 2, "source": 3}
>>> parts = [readings.Entropy().part(readings.Strip.of(left, sources=[0, 1], **whole)),
...          readings.Entropy().part(readings.Strip.of(right, sources=[2], **whole))]
>>> readings.Entropy().finish(readings.Entropy().merge(*parts))
tensor([0.8324, 0.6931])

All readings take the weights before dropout; values are float32 (float64 for float64 inputs).
A score of -inf is a blocked edge, whether the mask, a bias or an overflow made it so.
"""

from __future__ import annotations

from clearhead._core import did_you_mean
from clearhead.readings.cells import by_cell as by_cell
from clearhead.readings.cells import cell_bounds as cell_bounds
from clearhead.readings.fold import Blocks as Blocks
from clearhead.readings.fold import MapReading as MapReading
from clearhead.readings.fold import PerQuery as PerQuery
from clearhead.readings.fold import PerQueryReading as PerQueryReading
from clearhead.readings.fold import Reading
from clearhead.readings.kinds import (
    Distance,
    Entropy,
    LogSumExp,
    Mass,
    MaxScore,
    Received,
    Rows,
    Scores,
    TopK,
    TopKValue,
    Weights,
)
from clearhead.readings.maps import BlockMap, BlockMapValue, Overlap
from clearhead.readings.strip import Strip

__all__ = [
    "BlockMap",
    "BlockMapValue",
    "Distance",
    "Entropy",
    "LogSumExp",
    "Mass",
    "MaxScore",
    "Overlap",
    "Reading",
    "Received",
    "Rows",
    "Scores",
    "Strip",
    "TopK",
    "TopKValue",
    "Weights",
]

# What other libraries and papers call a reading.
_ELSEWHERE = {
    **dict.fromkeys(("maxlogit", "maxlogits", "maxattentionlogit", "maxscores"), "MaxScore"),
    **dict.fromkeys(("attention", "attentionweights", "probabilities"), "Weights"),
}


def __getattr__(name: str) -> object:
    """Suggest the reading that was meant by a name that is not there."""
    import difflib

    near = _ELSEWHERE.get(name.replace("_", "").lower()) or " or ".join(
        difflib.get_close_matches(name, [] if name.startswith("_") else __all__, n=2)
    )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(near)}")
