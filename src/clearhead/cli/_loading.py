"""From `--model` to something that reads text: the shipped GPT, a directory, an id, a GGUF file."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.errors import value_error
from clearhead.viewer.text import label, labels, token_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Reader", "load"]

SHIPPED = "the shipped GPT"


@dataclass
class Reader:
    """A model with its tokenizer, seen alike whatever library it comes from.

    `kind` is "next" (it predicts the token after a position), "masked" (the token at a masked
    position) or "none" (it predicts no tokens).
    """

    name: str
    model: nn.Module
    kind: str
    tokenizer: Any
    mask_id: int | None = None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, special tokens included."""
        return list(self.tokenizer(text)["input_ids"])

    def labels(self, ids: list[int]) -> list[str]:
        """Return a visible label for each token of a sequence."""
        return labels(token_bytes(self.tokenizer, ids))

    def predict(self, ids: list[int]) -> Tensor | None:
        """Run the model on one sequence; logits (position, vocab), or None without a token head."""
        import torch

        with torch.no_grad():
            answer = self.model(input_ids=torch.tensor([ids]))
        logits = getattr(answer, "logits", None)
        return None if self.kind == "none" or logits is None else logits[0]


class _Characters(Reader):
    """A teaching model: one token a character."""

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()

    def labels(self, ids: list[int]) -> list[str]:
        return [label(self.tokenizer.decode([id_])) for id_ in ids]

    def predict(self, ids: list[int]) -> Tensor | None:
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([ids]))[0]


def load(spec: str | None) -> Reader:
    """Load the model that `spec` names; a ValueError says what was looked for where."""
    if spec is None:
        return _teaching(None)
    path = Path(spec).expanduser()
    if path.is_file():
        return _gguf(path)
    if path.is_dir():
        ours = (path / "model.safetensors").is_file() and not (path / "config.json").exists()
        return _teaching(path) if ours else _hugging_face(spec, path)
    if path.suffix == ".gguf" or path.is_absolute() or spec.startswith("."):
        raise value_error("--model", "no such file or directory", got=repr(spec))
    return _hugging_face(spec, None)


def _teaching(path: Path | None) -> Reader:
    from clearhead import models

    model = models.load(path)
    vocabulary = model.vocabulary
    if isinstance(vocabulary, int):
        raise value_error("--model", "has no characters, only token numbers", got=repr(str(path)))
    name = SHIPPED if path is None else str(path)
    if isinstance(model, models.BERT):
        return _Characters(name, model, "masked", vocabulary, vocabulary.number["[MASK]"])
    return _Characters(name, model, "next", vocabulary)


def _gguf(path: Path) -> Reader:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise value_error(
                "--model",
                "a file must be GGUF",
                got=repr(str(path)),
                hint="name the directory that holds config.json and model.safetensors instead",
            )
    return _hugging_face(str(path), path.parent, gguf_file=path.name)


def _hugging_face(name: str, path: Path | None, **options: Any) -> Reader:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"--model {name} needs transformers; to do: pip install 'clearhead[hf]'"
        ) from error
    source = str(path or name)
    with _quiet():
        try:
            if options:
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                source, **{k: v for k, v in options.items() if k == "gguf_file"}
            )
            model, kind = _model(transformers, source, options)
        except Exception as error:
            # transformers raises many types here; the person needs the name and the reason.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise value_error(
                "--model",
                "no model could be loaded",
                got=repr(name),
                hint="give a directory with config.json and weights, a GGUF file or a model id "
                f"({reason[0]})",
            ) from error
    return Reader(name, model.eval(), kind, tokenizer, getattr(tokenizer, "mask_token_id", None))


def _model(transformers: Any, source: str, options: dict[str, Any]) -> tuple[Any, str]:
    import torch

    options = options | {"dtype": torch.float32}
    if options.get("gguf_file"):
        return transformers.AutoModelForCausalLM.from_pretrained(source, **options), "next"
    architectures = transformers.AutoConfig.from_pretrained(source).architectures or [""]
    if "ForMaskedLM" in architectures[0]:
        return transformers.AutoModelForMaskedLM.from_pretrained(source, **options), "masked"
    if "LMHead" in architectures[0] or "ForCausalLM" in architectures[0]:
        return transformers.AutoModelForCausalLM.from_pretrained(source, **options), "next"
    return transformers.AutoModel.from_pretrained(source, **options), "none"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and warnings about loading out of the terminal."""
    from transformers.utils import logging as chatter

    level, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    chatter.set_verbosity(logging.CRITICAL)
    chatter.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(open(os.devnull, "w")) as sink, sink:
            yield
    finally:
        chatter.set_verbosity(level)
        if bars:
            chatter.enable_progress_bar()
