"""Statistics of heads over a corpus: records, sequences, batches, checkpoints, a Parquet table."""

from __future__ import annotations

from clearhead.heads.corpus.checkpoint import Checkpoint
from clearhead.heads.corpus.corpus import Corpus
from clearhead.heads.corpus.job import Job, Stopped
from clearhead.heads.corpus.sequences import Sequences
from clearhead.heads.corpus.setup import (
    check_numbers,
    check_target,
    check_unfinished,
    check_use,
    make_job,
)
from clearhead.heads.corpus.shards import Shard
from clearhead.heads.corpus.table import merge, parquet, read

__all__ = [
    "Checkpoint",
    "Corpus",
    "Job",
    "Sequences",
    "Shard",
    "Stopped",
    "check_numbers",
    "check_target",
    "check_unfinished",
    "check_use",
    "make_job",
    "merge",
    "parquet",
    "read",
]
