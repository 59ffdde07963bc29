"""From `--model` to something that reads text: the shipped GPT, a directory, an id, a GGUF file."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead._core import value_error
from clearhead.cli.arguments import named
from clearhead.views.labels import label, labels, token_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KINDS", "Reader", "load", "missing"]

SHIPPED = "the shipped GPT"
# What the name of a model may be.
KINDS = "a directory with a model, a GGUF file, or OWNER/NAME of a model of the hub"
# Seconds that the hub has to answer in.
PATIENCE = 2.5


@dataclass
class Reader:
    """A model with its tokenizer, seen alike whatever library it comes from.

    `kind` is "next" (it predicts the token after a position), "masked" (the token at a masked
    position) or "none" (it predicts no tokens).
    """

    name: str
    model: Any
    kind: str
    tokenizer: Any
    mask_id: int | None = None

    @property
    def limit(self) -> int | None:
        """How many tokens the model reads at once; None where nothing says so."""
        config = getattr(self.model, "config", None)
        said = (
            getattr(config, "max_position_embeddings", None),
            getattr(self.tokenizer, "model_max_length", None),
        )
        # Tokenizers that know no limit say 1e30.
        return min((n for n in said if isinstance(n, int) and 0 < n < 1 << 40), default=None)

    @property
    def attends(self) -> bool:
        """Whether the model has attention, as far as that is known before it runs."""
        return True

    def must_fit(self, argument: str, length: int) -> None:
        """Refuse, under the name of an option, more tokens than the model reads."""
        if self.limit is not None and length > self.limit:
            raise value_error(
                argument,
                f"the model reads {self.limit} positions",
                got=length,
                hint=f"give at most {self.limit} tokens",
            )

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

    @property
    def limit(self) -> int | None:
        return self.model.length if self.attends else None

    @property
    def attends(self) -> bool:
        return self.model.name != "rnn"

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()

    def labels(self, ids: list[int]) -> list[str]:
        return [label(self.tokenizer.decode([id_])) for id_ in ids]

    def predict(self, ids: list[int]) -> Tensor | None:
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([ids]))[0]


def load(spec: str | None, argument: str = "--model", kinds: str = KINDS) -> Reader:
    """Load the model that `spec` names.

    An error says under `argument` what was looked for, and in `kinds` what may be named there.
    """
    with named(model=argument):
        return _load(spec, kinds)


def _load(spec: str | None, kinds: str) -> Reader:
    if spec is None:
        return _teaching(None)
    path = Path(spec).expanduser()
    if path.is_file():
        return _gguf(path)
    if path.is_dir():
        if (path / "config.json").exists():
            return _hugging_face(spec, str(path))
        if not (path / "model.safetensors").is_file():
            raise _no_model(spec, path)
        return _teaching(path)
    if path.suffix == ".gguf" or path.is_absolute() or not _ID.fullmatch(spec):
        raise missing(spec, kinds)
    return _from_hub(spec, kinds)


# As the hub names a model, OWNER/NAME; the oldest ones have no owner.
_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")


def missing(spec: str, kinds: str = KINDS) -> ValueError:
    """Build the error for a directory or file that is not there; it names those nearly so."""
    path = Path(spec).expanduser()
    hint = f"give {kinds}"
    if path.parent.is_dir():
        there = {p.name.lower(): p.name for p in path.parent.iterdir() if _holds_model(p)}
        near = difflib.get_close_matches(path.name.lower(), there, n=3)
        if near:
            names = " or ".join(str(path.parent / there[name]) for name in near)
            hint = f"did you mean {names}?"
    return value_error("model", "there is no such file or directory", got=repr(spec), hint=hint)


def _no_model(spec: str, path: Path) -> ValueError:
    inside = sorted(str(p) for p in path.iterdir() if p.is_dir() and _holds_model(p))
    more = f" and {len(inside) - 5} more" if len(inside) > 5 else ""
    hint = "choose one inside of it: " + ", ".join(inside[:5]) + more if inside else (
        "a model is config.json with its weights, or what `clearhead train FILE --out DIR` wrote"
    )  # fmt: skip
    return value_error("model", "the directory holds no model", got=repr(spec), hint=hint)


def _holds_model(path: Path) -> bool:
    if path.suffix == ".gguf":
        return path.is_file()
    try:
        return any((path / name).is_file() for name in ("config.json", "model.safetensors"))
    except OSError:
        return False


def _teaching(path: Path | None) -> Reader:
    from clearhead import models

    model = models.load(path)
    vocabulary = model.vocabulary
    if isinstance(vocabulary, int):
        raise value_error("model", "has no characters, only token numbers", got=repr(str(path)))
    name = SHIPPED if path is None else str(path)
    if isinstance(model, models.BERT):
        return _Characters(name, model, "masked", vocabulary, vocabulary.number["[MASK]"])
    return _Characters(name, model, "next", vocabulary)


def _gguf(path: Path) -> Reader:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise value_error(
                "model",
                "a file must be GGUF",
                got=repr(str(path)),
                hint="name the directory that holds config.json and model.safetensors instead",
            )
    return _hugging_face(str(path), str(path.parent), gguf_file=path.name)


def _from_hub(name: str, kinds: str) -> Reader:
    """Take what was fetched before; ask the hub once, and shortly, before anything is fetched."""
    _transformers(name)
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    fetched = ""
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        try:
            return _hugging_face(name, name, local_files_only=True)
        except ValueError as error:  # perhaps not all of it is there
            fetched = f"; of what was fetched before: {error}"
    if "/" not in name:
        raise missing(name, kinds)
    try:
        HfApi().model_info(name, timeout=PATIENCE)
    except RepositoryNotFoundError:
        rule = "is no directory here, and no model of the hub that can be seen"
        raise value_error("model", rule, got=repr(name)) from None
    except OfflineModeIsEnabled:
        rule = "is no directory here, and the hub is not asked while HF_HUB_OFFLINE is set"
        raise value_error("model", rule + fetched, got=repr(name)) from None
    except Exception as error:
        # The library of requests has been another one in each version; all have such errors.
        if not any("Connect" in t.__name__ or "Timeout" in t.__name__ for t in type(error).__mro__):
            return _hugging_face(name, name)
        rule = f"is no directory here, and the hub cannot be reached ({error}){fetched}"
        hint = "name a directory that exists, or try again with a connection"
        raise value_error("model", rule, got=repr(name), hint=hint) from error
    return _hugging_face(name, name)


def _transformers(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{name} needs transformers; to do: pip install 'clearhead[hf]'"
        ) from error
    return transformers


def _hugging_face(name: str, source: str, **where: Any) -> Reader:
    transformers = _transformers(name)
    with _quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where)
            model, kind = _model(transformers, source, where)
        except Exception as error:
            # transformers raises many types here; the person needs the name and the reason.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise value_error(
                "model",
                "no model could be loaded",
                got=repr(name),
                hint="give a directory with config.json, weights and tokenizer, a GGUF file or a "
                f"model id ({reason[0]})",
            ) from error
    return Reader(name, model.eval(), kind, tokenizer, getattr(tokenizer, "mask_token_id", None))


def _model(transformers: Any, source: str, where: dict[str, Any]) -> tuple[Any, str]:
    import torch

    options = where | {"dtype": torch.float32}
    if "gguf_file" in where:
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        return transformers.AutoModelForCausalLM.from_pretrained(source, **options), "next"
    architectures = transformers.AutoConfig.from_pretrained(source, **where).architectures or [""]
    if "ForMaskedLM" in architectures[0]:
        return transformers.AutoModelForMaskedLM.from_pretrained(source, **options), "masked"
    if "LMHead" in architectures[0] or "ForCausalLM" in architectures[0]:
        return transformers.AutoModelForCausalLM.from_pretrained(source, **options), "next"
    return transformers.AutoModel.from_pretrained(source, **options), "none"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and warnings about loading out of the terminal."""
    from huggingface_hub.utils import logging as hub_chatter
    from transformers.utils import logging as chatter

    level, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    hub_level = hub_chatter.get_verbosity()
    chatter.set_verbosity(logging.CRITICAL)
    hub_chatter.set_verbosity(logging.CRITICAL)
    chatter.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(open(os.devnull, "w")) as sink, sink:
            yield
    finally:
        chatter.set_verbosity(level)
        hub_chatter.set_verbosity(hub_level)
        if bars:
            chatter.enable_progress_bar()
