"""Attention over the ranks of a `torch.distributed` group: the same call, positions split.

Each rank holds consecutive positions and gets the same rows back:

    q, k, v = (distributed.shard(x) for x in (q, k, v))
    context = distributed.attend(q, k, v, masks.causal())
"""

from __future__ import annotations

from clearhead.distributed import sequence
from clearhead.distributed.gathering import gather, observed
from clearhead.distributed.scans import of_torchrun, scan_in_shards
from clearhead.distributed.shares import shard, unshard

attend = observed(sequence.attend)

__all__ = ["attend", "gather", "of_torchrun", "scan_in_shards", "shard", "unshard"]
