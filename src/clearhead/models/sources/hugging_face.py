"""Models and tokenizers of the transformers library: from a directory, a GGUF file or the hub."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from clearhead._core import value_error
from clearhead.models.sources.names import missing_model

__all__ = [
    "auto_class",
    "from_directory",
    "from_gguf",
    "from_hub",
    "quiet",
    "transformers_for",
]

# Seconds that the hub has to answer in.
PATIENCE = 2.5
# Model in eval mode, what it predicts, its tokenizer, and the id of its mask token.
Parts = tuple[Any, str, Any, int | None]


def from_gguf(path: Path) -> Parts:
    """Load a GGUF file, dequantized."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise value_error(
                "model",
                "a file must be GGUF",
                got=repr(str(path)),
                hint="name the directory that holds config.json and model.safetensors instead",
            )
    return from_directory(str(path), str(path.parent), gguf_file=path.name)


def from_hub(name: str, kinds: str) -> Parts:
    """Load from the local cache if possible; else ask the hub once before anything is fetched."""
    transformers_for(name)
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    fetched = ""
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        try:
            return from_directory(name, name, local_files_only=True)
        except ValueError as error:  # perhaps not all of it is there
            fetched = f"; of what was fetched before: {error}"
    if "/" not in name:
        raise missing_model(name, kinds)
    try:
        HfApi().model_info(name, timeout=PATIENCE)
    except RepositoryNotFoundError:
        rule = "is no directory here, and no model of the hub that can be seen"
        raise value_error("model", rule, got=repr(name)) from None
    except OfflineModeIsEnabled:
        rule = "is no directory here, and the hub is not asked while HF_HUB_OFFLINE is set"
        raise value_error("model", rule + fetched, got=repr(name)) from None
    except Exception as error:
        if not _is_connection_error(error):
            return from_directory(name, name)
        rule = f"is no directory here, and the hub cannot be reached ({error}){fetched}"
        hint = "name a directory that exists, or try again with a connection"
        raise value_error("model", rule, got=repr(name), hint=hint) from error
    return from_directory(name, name)


def _is_connection_error(error: Exception) -> bool:
    # The HTTP library differs between versions of the hub's client; all have such errors.
    return any("Connect" in t.__name__ or "Timeout" in t.__name__ for t in type(error).__mro__)


def transformers_for(name: str) -> Any:
    """Import the library; an error says which model needs it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{name} needs transformers; to do: pip install 'clearhead[hf]'"
        ) from error
    return transformers


def from_directory(name: str, source: str, **where: Any) -> Parts:
    """Load what transformers finds under `source`; an error calls it `name`."""
    transformers = transformers_for(name)
    with quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where)
            model, kind = _model(transformers, source, where)
        except Exception as error:
            # transformers raises many types here; the user needs the name and the reason.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise value_error(
                "model",
                "no model could be loaded",
                got=repr(name),
                hint="give a directory with config.json, weights and tokenizer, a GGUF file or a "
                f"model id ({reason[0]})",
            ) from error
    return model.eval(), kind, tokenizer, getattr(tokenizer, "mask_token_id", None)


def _model(transformers: Any, source: str, where: dict[str, Any]) -> tuple[Any, str]:
    options = where | {"dtype": torch.float32}
    if "gguf_file" in where:
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        return transformers.AutoModelForCausalLM.from_pretrained(source, **options), "next"
    made, kind = auto_class(transformers, transformers.AutoConfig.from_pretrained(source, **where))
    return made.from_pretrained(source, **options), kind


def auto_class(transformers: Any, config: Any) -> tuple[Any, str]:
    """Choose the class that builds the model of a config, and say what that predicts."""
    name = (config.architectures or [""])[0]
    if "ForMaskedLM" in name:
        return transformers.AutoModelForMaskedLM, "masked"
    if "LMHead" in name or "ForCausalLM" in name:
        return transformers.AutoModelForCausalLM, "next"
    return transformers.AutoModel, "none"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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
