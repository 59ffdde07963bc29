"""A training run of the command: begin one that fits into memory, and find where it writes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from clearhead._core import value_error
from clearhead.attention import free_bytes
from clearhead.models.bert import BERT
from clearhead.models.checkpoint import KINDS, MODEL_FILE, no_weights
from clearhead.models.generating import generate
from clearhead.models.text import Characters
from clearhead.models.train import TRAINING_FILE, Settings, Training, text_training

__all__ = ["begin", "output_directory", "samples"]


def begin(
    name: str, text: str, settings: Settings, sizes: dict[str, Any], *, threads: int | None = None
) -> Training:
    """Set up the training of a fresh "gpt", "bert" or "rnn"; the seed determines its weights."""
    kind = KINDS[name]
    vocabulary = Characters.of(text, kind.special)
    _must_fit(kind, vocabulary, sizes)
    # A seed gives the same weights, and the caller's RNG state is left alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = kind(vocabulary, **sizes)
    return text_training(model, text, settings, threads=threads)


def _must_fit(kind: Any, vocabulary: Characters, sizes: dict[str, Any]) -> None:
    """Refuse a model that memory cannot hold, before making it takes all of the memory."""

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


def output_directory(path: Path, *, overwrite: bool) -> Path:
    """Make the directory of a run, and find out before the work whether it can be written."""
    taken = [name for name in (MODEL_FILE, TRAINING_FILE) if (path / name).exists()]
    if taken and not overwrite:
        hint = "choose another --out, or --force to overwrite it"
        raise value_error("out", f"{path} holds {taken[0]} already", hint=hint)
    if path.exists() and not path.is_dir():
        raise value_error("out", "needs to be a directory", got=f"the file {path}")
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        return path


def samples(model: Any, text: str) -> dict[str, str]:
    """What a model has learned: the text that it continues ("text"), or "gaps" and "filled"."""
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
    # One sign a gap, so that the two lines stand under each other.
    gaps = words.decode(hidden).replace("[MASK]", "_")
    return {"gaps": gaps, "filled": words.decode(filled)}
