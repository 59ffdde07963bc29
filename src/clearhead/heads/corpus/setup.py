"""The set-up of a scan: checks of its options and its target, and what identifies it."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clearhead._core import value_error
from clearhead.heads.corpus.checkpoint import Checkpoint
from clearhead.heads.corpus.corpus import Corpus
from clearhead.heads.corpus.job import Job
from clearhead.heads.corpus.sequences import Sequences
from clearhead.heads.corpus.shards import Shard
from clearhead.heads.survey import Survey

__all__ = ["check_numbers", "check_target", "check_unfinished", "check_use", "make_job"]

# At most so many bytes identify a corpus; reading them takes about a second.
DIGESTED = 1 << 30


def check_numbers(options: Mapping[str, Any]) -> None:
    """Refuse impossible numbers."""
    for name in ("length", "batch", "limit"):
        if options[name] is not None and options[name] < 1:
            raise value_error(f"--{name}", "must be at least 1", got=options[name])
    if options["shard"] is not None:
        Shard.parse(options["shard"])
        if options["per_document"]:
            hint = "scan the documents of each part of the corpus, as files of their own"
            raise value_error("--shard", "does not go with --per-document", hint=hint)
    if not options["every"] >= 0:
        raise value_error("--every", "must be a number of seconds", got=options["every"])


def check_use(corpus: Corpus, *, field: str | None, by: str | None) -> None:
    """Refuse an option that has no effect on this format of corpus."""
    if corpus.format == "text" and field is not None:
        hint = "leave it out, or name the --format"
        raise value_error("--field", "is for JSON lines and Parquet, and this is text", hint=hint)
    if corpus.format != "text" and by is not None:
        raise value_error("--by", f"is for text, and this is {corpus.format}", hint="leave it out")


def check_target(target: Path, corpus: Path, model: Path | None) -> None:
    """Refuse before the work a target that cannot be written, or that is an input."""
    if target.is_dir():
        raise value_error("--out", "needs to be a file", got=f"the directory {target}")
    if target.exists() and not target.is_file():
        # The table would replace a device or pipe of that name.
        raise value_error("--out", "needs to be a file", got=f"the device or pipe {target}")
    if not target.parent.is_dir():
        raise value_error("--out", "lies in no directory that exists", got=target)
    if not os.access(target.parent, os.W_OK):
        raise value_error("--out", "lies in a directory that cannot be written", got=target)
    if target.exists() and corpus.exists() and target.samefile(corpus):
        raise value_error("--out", "is the corpus itself", got=target)
    if target.exists() and model is not None and _is_part_of(target, model):
        raise value_error("--out", "is a file of the model itself", got=target)


def _is_part_of(file: Path, model: Path) -> bool:
    files = model.iterdir() if model.is_dir() else [model]
    return any(part.is_file() and part.samefile(file) for part in files)


def check_unfinished(checkpoint: Checkpoint, *, force: bool, resume: bool) -> None:
    """Refuse to overwrite a table or an unfinished scan without --force or --resume."""
    target, going_on = checkpoint.target, resume and checkpoint.exists
    # A scan begun with --force keeps the old table until it has a new one. A table that came later
    # belongs to another scan.
    if target.exists() and not (force or (going_on and checkpoint.newer)):
        hint = "--force writes over it"
        if resume and not checkpoint.exists:
            hint = f"nothing is left to resume; {hint}"
        raise value_error("--out", "exists", got=target, hint=hint)
    if checkpoint.exists and not (force or resume):
        hint = "--resume goes on with it, --force starts over"
        got = checkpoint.home
        raise value_error("--out", "has an unfinished scan beside it", got=got, hint=hint)


def make_job(
    model: Any,
    name: str,
    spec: str | None,
    encode: Callable[[str], list[int]],
    corpus: Corpus,
    checkpoint: Checkpoint,
    *,
    length: int,
    limit: int | None,
    per_document: bool,
    every: float,
    shard: Shard | None = None,
) -> Job:
    """Set up a scan of `corpus` with a model and the function that makes token ids of a text.

    `name` is shown, `spec` loads the model again (None: the shipped model).
    """
    about: dict[str, Any] = {
        "model": name,
        "spec": spec,
        "weights": _fingerprint(model),
        "corpus": str(corpus.path),
        "contents": f"{corpus.size} bytes, {_contents(corpus.path)}",
        "format": corpus.format,
        "by": corpus.by if corpus.format == "text" else "record",
        "field": corpus.field if corpus.format != "text" else None,
        "length": length,
        "limit": limit,
        "per_document": per_document,
    }
    _quiet_tokenizers()
    sequences = Sequences(corpus, encode, length, limit)
    return Job(
        Survey(model), sequences, checkpoint, about,
        per_document=per_document, every=every, shard=shard,
    )  # fmt: skip


def _quiet_tokenizers() -> None:
    """Drop the tokenizer's warning of long texts: they are cut into sequences."""
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()


def _fingerprint(model: Any) -> str:
    """Identify a model by its shapes and some of its weights."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        some = tensor.flatten()[:64].float().cpu().numpy().tobytes()
        digest.update(f"{name}{tuple(tensor.shape)}".encode() + some)
    return digest.hexdigest()[:16]


def _contents(path: Path) -> str:
    """Identify the contents of a file; of a large one its beginning and its date."""
    size, changed = path.stat().st_size, path.stat().st_mtime_ns
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while (piece := file.read(1 << 20)) and file.tell() <= DIGESTED:
            digest.update(piece)
    return digest.hexdigest()[:16] + (f", changed {changed}" if size > DIGESTED else "")
