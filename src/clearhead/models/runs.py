"""A training run on disk: set-up, output directory, checkpoints and samples."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from clearhead._core import (
    StopRequests,
    is_file_at,
    link_target,
    remove_parts,
    take_lock,
    value_error,
)
from clearhead.attention import free_bytes
from clearhead.models.bert import BERT
from clearhead.models.checkpoint import KINDS, MODEL_FILE, no_weights
from clearhead.models.generating import generate
from clearhead.models.ranks import ALONE, HEADER_FILE, Group, remove_parts_of_shards
from clearhead.models.text import Characters
from clearhead.models.train import TRAINING_FILE, Settings, Step, Training, text_training

__all__ = ["begin", "output_directory", "run_and_save", "samples", "training_fits"]


def begin(
    name: str,
    text: str,
    file: str,
    options: dict[str, Any],
    sizes: dict[str, Any],
    *,
    threads: int | None = None,
    group: Group = ALONE,
) -> Training:
    """Set up the training of a fresh "gpt", "bert" or "rnn" on the text of a file.

    `options` may hold steps, batch, lr and seed, which determines the weights too.
    """
    settings = _settings(**options).reading(file)
    kind = KINDS[name]
    vocabulary = Characters.of(text, kind.special)
    _must_fit(kind, vocabulary, sizes)
    # The caller's RNG state is left alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = kind(vocabulary, **sizes)
    return text_training(model, text, settings, threads=threads, group=group)


def _settings(lr: float = Settings.learning_rate, **options: Any) -> Settings:
    # Twenty validations in a run: enough to watch it, few enough to be cheap.
    every = min(max(options.get("steps", Settings.steps) // 20, 1), 100)
    return Settings(learning_rate=lr, validate_every=every, **options)


def _must_fit(kind: Any, vocabulary: Characters, sizes: dict[str, Any]) -> None:
    """Refuse a model that does not fit into memory, before it is created."""

    def parameters(layers: int) -> int:
        with no_weights():
            model = kind(vocabulary, **(sizes | {"layers": layers}))
        return sum(parameter.numel() for parameter in model.parameters())

    layers = sizes.get("layers", 1)
    if not 0 < layers < 2**31:
        return  # the model itself refuses this
    first = parameters(1)
    count = first + (layers - 1) * (parameters(2) - first)
    # In float32: parameter, gradient and the two averages of the optimizer.
    needed, free = 16 * count, free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        raise value_error(
            "width, layers",
            "the training of the model must fit into memory",
            got=f"{count:,} parameters, {needed:,} bytes with {free:,} free",
            hint="make the model smaller",
        )


@contextmanager
def output_directory(path: Path, *, overwrite: bool, source: Path | None = None) -> Iterator[Path]:
    """Create and lock the directory of a run, and check that it can be written.

    `source` is the text that is read: its file is never overwritten. A new directory that is still
    empty at the end is removed.
    """
    if path.exists() and not path.is_dir():
        raise value_error("out", "needs to be a directory", got=f"the file {path}")
    fresh = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    with _only_writer(path):
        try:
            _check_files(path, overwrite, source)
            yield path
        finally:
            if fresh:
                with suppress(OSError):
                    path.rmdir()  # fails unless it is empty


def _check_files(path: Path, overwrite: bool, source: Path | None) -> None:
    files = [path / MODEL_FILE, path / TRAINING_FILE, path / HEADER_FILE]
    taken = [file for file in files if file.exists() or file.is_symlink()]
    if taken and not overwrite:
        hint = "choose another --out, or --force to overwrite it"
        raise value_error("out", f"{path} holds {taken[0].name} already", hint=hint)
    for file in taken:
        if source is not None and source.exists() and file.exists() and file.samefile(source):
            raise value_error("out", "would overwrite the text that is read", got=file)
        target = link_target(file)
        if not target.parent.is_dir() or (target.exists() and not target.is_file()):
            raise value_error("out", "holds a link that leads to no file", got=file)
    with tempfile.TemporaryFile(dir=path):
        pass


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Lock a directory: of two trainings that write one model, one would be lost."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if not take_lock(handle) or not is_file_at(handle, path):
            hint = "wait for it, or write to another directory"
            raise value_error("out", "another training writes it", got=path, hint=hint)
        for name in (MODEL_FILE, TRAINING_FILE, HEADER_FILE):
            remove_parts(path / name)
        remove_parts_of_shards(path)
        yield
    finally:
        os.close(handle)


def run_and_save(
    training: Training,
    path: Path,
    stop: StopRequests,
    show: Callable[[Step], None],
    *,
    every: float | None = None,
) -> None:
    """Train to the last step or to a request to stop.

    The run is saved at each validation, after `every` seconds (30) without one, and where it stops.
    Of several processes all stop where one of them is asked to.
    """
    saved, every = time.monotonic(), 30 if every is None else every
    for step in training:
        with training.group.naming_lost(f"step {training.step} of the training"):
            show(step)
            late, asked = training.group.sums(time.monotonic() - saved >= every, stop.asked)
        if step.validation is not None or late or asked:
            training.save(path)
            saved = time.monotonic()
        if asked:
            return


@contextmanager
def training_fits(advice: str) -> Iterator[None]:
    """Raise a MemoryError with advice where torch cannot allocate; it has no error of its own."""
    try:
        yield
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise MemoryError(f"the training does not fit into memory: {advice}") from None


def samples(model: Any, text: str) -> dict[str, str]:
    """Show what a model has learned: its continuation ("text"), or "gaps" and "filled" gaps."""
    model.eval()
    if not isinstance(model, BERT):
        start = text[: model.length // 4 + 1]
        return {"text": generate(model, start, 200, temperature=0.8)}
    words = model.vocabulary
    assert isinstance(words, Characters)
    shown = words.encode(text[: min(model.length, 64)], special=False)
    hidden = shown.clone()
    hidden[3::7] = words.number["[MASK]"]
    with torch.no_grad():
        guessed = model(hidden[None])[0, :, len(words.special) :].argmax(-1) + len(words.special)
    filled = hidden.where(hidden != words.number["[MASK]"], guessed)
    # One sign per gap, so that the two lines align.
    gaps = words.decode(hidden).replace("[MASK]", "_")
    return {"gaps": gaps, "filled": words.decode(filled)}
