"""`clearhead scan CORPUS`: what every head of a model does, over as much text as there is."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead._core import value_error
from clearhead.cli.arguments import examples

if TYPE_CHECKING:
    from clearhead.heads.corpus import Checkpoint, Corpus, Job
    from clearhead.views.reader import Reader

HELP = "measure what every head does over a corpus, as a Parquet table"
# Tokens of a sequence, unless the model reads fewer.
LENGTH = 256
# Bytes that are read once more, in a second, to know whether a corpus is still the same.
DIGESTED = 1 << 30
# Seconds between two lines of progress where there is no terminal.
QUIET = 30
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `clearhead scan`."""
    parser.add_argument("corpus", metavar="CORPUS", help="text, JSON lines or Parquet")
    parser.add_argument(
        "--model",
        metavar="SPEC",
        help="a checkpoint directory, a Hugging Face directory or id, or a GGUF file "
        "(default: the GPT that is shipped)",
    )
    parser.add_argument("--out", metavar="FILE", required=True, help="the table to write")
    parser.add_argument(
        "--format", choices=("text", "jsonl", "parquet"), help="of the corpus (default: by name)"
    )
    parser.add_argument(
        "--by",
        choices=("line", "paragraph"),
        default="line",
        help="what a record of a text file is (line)",
    )
    parser.add_argument(
        "--field",
        metavar="NAME",
        default="text",
        help="the JSON field or Parquet column that is read (text)",
    )
    parser.add_argument(
        "--length",
        type=int,
        metavar="N",
        help=f"cut records into sequences of at most N tokens ({LENGTH}, or what the model reads)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="N",
        default=32,
        help="run up to N sequences of one length together; the table is the same (32)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="read the first N records only")
    parser.add_argument(
        "--per-document", action="store_true", help="one row for each record, instead of for all"
    )
    going = parser.add_mutually_exclusive_group()
    going.add_argument("--resume", action="store_true", help="go on where a scan was stopped")
    going.add_argument("--force", action="store_true", help="write over FILE, start over")
    parser.add_argument(
        "--every", type=float, default=30, metavar="SECONDS", help="between checkpoints (30)"
    )
    examples(
        parser,
        "clearhead scan page.txt --out page.heads",
        "clearhead scan corpus.jsonl --model openai-community/gpt2 --out corpus.heads",
        "clearhead scan corpus.jsonl --out corpus.heads --resume",
    )


def run(arguments: argparse.Namespace) -> int:
    """Scan, and say what was written; 130 where it was stopped."""
    target = Path(arguments.out).expanduser()
    _check(arguments, target)
    from clearhead.heads.corpus import Checkpoint, Corpus, parquet

    parquet()
    corpus = Corpus(
        Path(arguments.corpus).expanduser(),
        format=arguments.format, by=arguments.by, field=arguments.field,
    )  # fmt: skip
    checkpoint = Checkpoint(target)
    with checkpoint.held():
        _check_unfinished(arguments, checkpoint)
        return _scan(arguments, _job(arguments, corpus, checkpoint))


def _scan(arguments: argparse.Namespace, job: Job) -> int:
    from clearhead.heads.corpus import Stopped

    if arguments.resume and job.checkpoint.exists:
        job.resume()
        _say(f"resumed after {job.survey.sequences} sequences")
    elif arguments.resume:
        _say("nothing to resume: starting at the beginning")
    else:
        job.checkpoint.clear()
    try:
        with _progress(job.share, job.survey.tokens) as tell:
            job.run(tell, arguments.batch)
    except Stopped:
        _say(f"stopped after {job.survey.sequences} sequences; --resume goes on from there")
        return INTERRUPTED
    _report(job)
    print(f"Wrote {job.checkpoint.target}")
    return 0


def _check(arguments: argparse.Namespace, target: Path) -> None:
    """Refuse before any work what would fail after it."""
    for name in ("length", "batch", "limit"):
        given = getattr(arguments, name)
        if given is not None and given < 1:
            raise value_error(f"--{name}", "must be at least 1", got=given)
    if not arguments.every >= 0:
        raise value_error("--every", "must be a number of seconds", got=arguments.every)
    if target.is_dir():
        raise value_error("--out", "needs to be a file", got=f"the directory {target}")
    if target.exists() and not target.is_file():
        # A table takes the place of what has its name, be it a device.
        raise value_error("--out", "needs to be a file", got=f"the device or pipe {target}")
    if not target.parent.is_dir():
        raise value_error("--out", "lies in no directory that exists", got=target)
    if not os.access(target.parent, os.W_OK):
        raise value_error("--out", "lies in a directory that cannot be written", got=target)
    corpus = Path(arguments.corpus).expanduser()
    if target.exists() and corpus.exists() and target.samefile(corpus):
        raise value_error("--out", "is the corpus itself", got=target)


def _check_unfinished(arguments: argparse.Namespace, checkpoint: Checkpoint) -> None:
    target, going_on = checkpoint.target, arguments.resume and checkpoint.exists
    # A scan begun with --force keeps the old table until it has a new one. A table that came later
    # is another's.
    if target.exists() and not (arguments.force or (going_on and checkpoint.newer)):
        hint = "--force writes over it"
        if arguments.resume and not checkpoint.exists:
            hint = f"nothing is left to resume; {hint}"
        raise value_error("--out", "exists", got=target, hint=hint)
    if checkpoint.exists and not (arguments.force or arguments.resume):
        hint = "--resume goes on with it, --force starts over"
        got = checkpoint.home
        raise value_error("--out", "has an unfinished scan beside it", got=got, hint=hint)


def _job(arguments: argparse.Namespace, corpus: Corpus, checkpoint: Checkpoint) -> Job:
    from clearhead.heads import Survey
    from clearhead.heads.corpus import Job, Sequences
    from clearhead.views.reader import load

    reader = load(arguments.model)
    if not reader.attends:
        raise value_error(
            "--model",
            "an RNN has no attention, so there is nothing to measure",
            got=reader.name,
            hint="scan a gpt or bert; clearhead look shows what an answer of an RNN hangs on",
        )
    length = _length(reader, arguments.length)
    about: dict[str, Any] = {
        "model": reader.name,
        "weights": _fingerprint(reader.model),
        "corpus": str(corpus.path),
        "contents": f"{corpus.size} bytes, {_contents(corpus.path)}",
        "format": corpus.format,
        "by": arguments.by if corpus.format == "text" else "record",
        "field": arguments.field if corpus.format != "text" else None,
        "length": length,
        "limit": arguments.limit,
        "per_document": arguments.per_document,
    }
    sequences = Sequences(corpus, _encoder(reader), length, arguments.limit)
    return Job(
        Survey(reader.model), sequences, checkpoint, about,
        per_document=arguments.per_document, every=arguments.every,
    )  # fmt: skip


def _encoder(reader: Reader) -> Callable[[str], list[int]]:
    """Encode without the tokenizer's warning of long texts: they are cut into sequences."""
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
    return reader.encode


def _length(reader: Reader, asked: int | None) -> int:
    if asked is None:
        return min(LENGTH, reader.limit or LENGTH)
    reader.must_fit("--length", asked)
    return asked


def _fingerprint(model: Any) -> str:
    """Tell models apart by their sizes and some of their numbers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        some = tensor.flatten()[:64].float().cpu().numpy().tobytes()
        digest.update(f"{name}{tuple(tensor.shape)}".encode() + some)
    return digest.hexdigest()[:16]


def _contents(path: Path) -> str:
    """Tell contents apart; of large files the beginning and the date."""
    size, changed = path.stat().st_size, path.stat().st_mtime_ns
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while (piece := file.read(1 << 20)) and file.tell() <= DIGESTED:
            digest.update(piece)
    return digest.hexdigest()[:16] + (f", changed {changed}" if size > DIGESTED else "")


@contextmanager
def _progress(share: float, tokens: int) -> Iterator[Callable[[float, int], None]]:
    """Show how far the corpus is read, how fast and for how long still."""
    started = time.monotonic()
    first = (share, tokens)

    def words(share: float, tokens: int) -> str:
        gone = time.monotonic() - started
        fresh = share - first[0]
        left = gone * (1 - share) / fresh if fresh > 0 else 0
        speed = (tokens - first[1]) / gone if gone else 0
        return f"{tokens:,} tokens, {speed:,.0f} a second, {_clock(left)} left"

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("reading", total=1000, completed=round(1000 * share))
            yield lambda share, tokens: bar.update(
                task, completed=round(1000 * share), description=words(share, tokens)
            )
        return
    last = [started]

    def tell(share: float, tokens: int) -> None:
        if time.monotonic() - last[0] >= QUIET:
            last[0] = time.monotonic()
            _say(f"{share:.0%}, {words(share, tokens)}")

    yield tell


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _report(job: Job) -> None:
    survey = job.survey
    heads = sum(layer.heads for layer in survey.layers)
    print(
        f"{job.place.record:,} records, {survey.sequences:,} sequences, {survey.tokens:,} tokens: "
        f"{len(survey.layers)} layers, {heads} heads"
    )
    for reason, (count, place) in job.problems().items():
        print(f"left out: {count:,} {reason}; the first: {place}")
    for note in survey.notes:
        print(f"note: {note}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
