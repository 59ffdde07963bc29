"""From the name of a model to the model: the shipped GPT, a directory, a GGUF file, a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from clearhead._core import value_error
from clearhead.models import checkpoint
from clearhead.models.bert import BERT
from clearhead.models.sources.hugging_face import from_directory, from_gguf, from_hub
from clearhead.models.sources.names import HUB_ID, KINDS, missing_model, no_model_in

__all__ = ["LoadedModel", "find_model"]

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
