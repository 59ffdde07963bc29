"""`clearhead scan CORPUS`: what every head of a model does, over as much text as there is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead._core import StopRequests, link_target, value_error
from clearhead.cli.arguments import named
from clearhead.cli.options.scan import LENGTH, add_arguments

__all__ = ["HELP", "add_arguments", "run"]

if TYPE_CHECKING:
    from clearhead.heads.corpus import Checkpoint, Corpus, Job

HELP = "measure what every head does over a corpus, as a Parquet table"
INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """Scan, and say what was written; 130 where it was stopped."""
    from clearhead.distributed import of_torchrun
    from clearhead.heads.corpus import check_numbers, check_target, parquet

    path, model = Path(arguments.corpus).expanduser(), arguments.model
    check_numbers(vars(arguments))
    with named(path="--out"):
        target = link_target(Path(arguments.out).expanduser())
    check_target(target, path, None if model is None else Path(model).expanduser())
    parquet()
    rank = of_torchrun()
    return scan_to(arguments, target) if rank is None else _scan_shard(arguments, target, rank)


def _scan_shard(arguments: argparse.Namespace, target: Path, rank: tuple[int, int]) -> int:
    """Scan the shard of a process that torchrun started."""
    from clearhead.distributed import scan_in_shards

    if arguments.shard is not None:
        hint = "leave it out: torchrun gives each process its shard"
        raise value_error("--shard", "is for processes that know of no others", hint=hint)
    if target.exists() and not arguments.force:
        raise value_error("--out", "exists", got=target, hint="--force writes over it")

    def scan(shard: str, file: Path, again: bool) -> int:
        own = {**vars(arguments), "shard": shard, "out": str(file)}
        own |= {"resume": True, "force": False} if again else {}
        return scan_to(argparse.Namespace(**own), file)

    code = scan_in_shards(target, rank, scan)
    if code == 0 and rank[0] == 0:
        print(f"Wrote {Path(arguments.out).expanduser()}", flush=True)
    return code


def scan_to(arguments: argparse.Namespace, target: Path) -> int:
    """Scan the corpus, or one shard of it, into a file."""
    from clearhead.heads.corpus import Checkpoint, Corpus, check_unfinished, check_use

    path, field, by = Path(arguments.corpus).expanduser(), arguments.field, arguments.by
    corpus = Corpus(path, format=arguments.format, by=by or "line", field=field or "text")
    check_use(corpus, field=field, by=by)
    checkpoint = Checkpoint(target)
    with StopRequests() as stop, checkpoint.held():
        if arguments.resume and arguments.shard is not None and target.exists():
            return _finished(_job(arguments, corpus, checkpoint), target)
        check_unfinished(checkpoint, force=arguments.force, resume=arguments.resume)
        return _scan(arguments, _job(arguments, corpus, checkpoint), stop)


def _finished(job: Job, target: Path) -> int:
    """Say that a resumed shard was finished before; raise where the file is another shard's."""
    job.check_same(target)
    _say(f"{target} is finished: nothing to resume")
    return 0


def _job(arguments: argparse.Namespace, corpus: Corpus, checkpoint: Checkpoint) -> Job:
    from clearhead.heads.corpus import Shard, make_job
    from clearhead.views import open_reader

    with named(model="--model"):
        reader = open_reader(arguments.model)
    if not reader.attends:
        hint = "scan a gpt or bert; clearhead look shows what an answer of an RNN depends on"
        rule = "an RNN has no attention, so there is nothing to measure"
        raise value_error("--model", rule, got=reader.name, hint=hint)
    length = arguments.length or min(LENGTH, reader.limit or LENGTH)
    reader.must_fit("--length", length)
    shard = None if arguments.shard is None else Shard.parse(arguments.shard)
    return make_job(
        reader.model, reader.name, arguments.model, reader.encode, corpus, checkpoint,
        length=length, limit=arguments.limit,
        per_document=arguments.per_document, every=arguments.every, shard=shard,
    )  # fmt: skip


def _scan(arguments: argparse.Namespace, job: Job, stop: StopRequests) -> int:
    from clearhead.heads.corpus import Stopped
    from clearhead.views import scan_progress, scan_summary

    if arguments.resume and job.checkpoint.exists:
        job.resume()
        _say(f"resumed after {job.survey.sequences} sequences")
    elif arguments.resume:
        _say("nothing to resume: starting at the beginning")
    else:
        job.checkpoint.clear()
    try:
        with scan_progress(job.share, job.survey.tokens) as tell:
            job.run(tell, arguments.batch, stop)
    except Stopped:
        _say(f"stopped after {job.survey.sequences} sequences; --resume goes on from there")
        return INTERRUPTED
    print(*scan_summary(job), sep="\n")
    print(f"Wrote {Path(arguments.out).expanduser()}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
