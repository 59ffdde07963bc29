"""From the name of a model to the model: the shipped GPT, a directory, a GGUF file, a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from clearhead._core import value_error
from clearhead.models import checkpoint
from clearhead.models.bert import BERT
from clearhead.models.sources.hugging_face import from_directory, from_gguf, from_hub
from clearhead.models.sources.names import HUB_ID, KINDS, missing_model, no_model_in
from clearhead.models.text import Characters

__all__ = ["LoadedModel", "encode", "find_model", "load"]


SHIPPED = "the shipped GPT"


class LoadedModel(NamedTuple):
    """A model with its tokenizer (the vocabulary of a teaching model), in eval mode.

    `kind` is "next" (it predicts the token after a position), "masked" (the token at a masked
    position) or "none" (it predicts no tokens).
    """

    name: str
    model: Any
    kind: str
    tokenizer: Any
    mask_id: int | None = None


def load(spec: str | Path | None = None) -> Any:
    """Load a model in eval mode and float32; without a name, the GPT that ships with the library.

    >>> load().name
    'gpt'

    `spec` is a directory that `save` or `clearhead train` wrote, a directory or an id of a model of
    Hugging Face, or a GGUF file. A model of that library has its tokenizer as `model.tokenizer`,
    one of this library its characters as `model.vocabulary`; `encode` takes either. A file that is
    no model, is damaged or has another version is a ValueError that says so.
    """
    path = None if spec is None else Path(spec).expanduser()
    if path is None or not _is_foreign(path, named=isinstance(spec, str)):
        return checkpoint.load(path)
    loaded = find_model(str(spec))
    loaded.model.tokenizer = loaded.tokenizer
    return loaded.model


def _is_foreign(path: Path, *, named: bool) -> bool:
    if path.exists():
        return path.is_file() or (path / "config.json").exists()
    return named and not path.is_absolute() and HUB_ID.fullmatch(str(path)) is not None


def encode(model: Any, text: str) -> Int[Tensor, "batch position"]:
    """Turn a text into the tokens of a model that `load` gave: one sequence.

    >>> encode(load(), "hell").shape
    torch.Size([1, 4])
    """
    vocabulary = getattr(model, "vocabulary", None)
    if isinstance(vocabulary, Characters):
        return vocabulary.encode(text)[None]
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        hint = "clearhead.models.load gives one that does"
        raise value_error("model", "knows no text, only token ids", got=type(model), hint=hint)
    return torch.tensor([tokenizer(text)["input_ids"]])


def find_model(spec: str | None, kinds: str = KINDS) -> LoadedModel:
    """Load the model that `spec` names; an error says what `kinds` of names there are."""
    if spec is None:
        return _teaching(None)
    path = Path(spec).expanduser()
    if path.is_file():
        return LoadedModel(str(path), *from_gguf(path))
    if path.is_dir():
        if (path / "config.json").exists():
            return LoadedModel(spec, *from_directory(spec, str(path)))
        if not (path / "model.safetensors").is_file():
            raise no_model_in(spec, path)
        return _teaching(path)
    if path.suffix == ".gguf" or path.is_absolute() or not HUB_ID.fullmatch(spec):
        raise missing_model(spec, kinds)
    return LoadedModel(spec, *from_hub(spec, kinds))


def _teaching(path: Path | None) -> LoadedModel:
    model = checkpoint.load(path)
    vocabulary = model.vocabulary
    if isinstance(vocabulary, int):
        raise value_error("model", "has no characters, only token numbers", got=repr(str(path)))
    name = SHIPPED if path is None else str(path)
    if isinstance(model, BERT):
        return LoadedModel(name, model, "masked", vocabulary, vocabulary.number["[MASK]"])
    return LoadedModel(name, model, "next", vocabulary)
