"""Three small models to learn from, each one file read from top to bottom.

`GPT` (causal, next token), `BERT` (both ways, hidden tokens) and `RNN` (one state carried along:
the contrast). `clearhead.models.train` trains all three; `load` reads what it saved, and whatever
else the command reads: directories and ids of Hugging Face, GGUF files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clearhead.models.bert import BERT
from clearhead.models.checkpoint import is_checkpoint, save
from clearhead.models.generating import generate, stream
from clearhead.models.gpt import GPT
from clearhead.models.rnn import RNN
from clearhead.models.sources import (
    KINDS,
    LoadedModel,
    encode,
    find_model,
    from_factory,
    is_factory,
    load,
    maskable_inputs,
    missing_model,
    model_errors,
    named_inputs,
    packed_inputs,
    random_tokens,
    refuse_bare_module,
    tiny_model,
)
from clearhead.models.text import Characters, read_text, shipped_text
from clearhead.models.threads import small_threads

if TYPE_CHECKING:
    from clearhead.models.ranks import Group, RefusedByFirst, process_group
    from clearhead.models.runs import begin, output_directory, run_and_save, samples, training_fits
    from clearhead.models.train import Settings, Step, Training, resume, text_of, text_training

__all__ = [
    "BERT",
    "GPT",
    "KINDS",
    "RNN",
    "Characters",
    "Group",
    "LoadedModel",
    "RefusedByFirst",
    "Settings",
    "Step",
    "Training",
    "begin",
    "encode",
    "find_model",
    "from_factory",
    "generate",
    "is_checkpoint",
    "is_factory",
    "load",
    "maskable_inputs",
    "missing_model",
    "model_errors",
    "named_inputs",
    "output_directory",
    "packed_inputs",
    "process_group",
    "random_tokens",
    "read_text",
    "refuse_bare_module",
    "resume",
    "run_and_save",
    "samples",
    "save",
    "shipped_text",
    "small_threads",
    "stream",
    "text_of",
    "text_training",
    "tiny_model",
    "training_fits",
]

# Imported at the first use: `python -m clearhead.models.train` runs a module that is not imported.
_LATER = {
    "ranks": ("Group", "RefusedByFirst", "process_group"),
    "runs": ("begin", "output_directory", "run_and_save", "samples", "training_fits"),
    "train": ("Settings", "Step", "Training", "resume", "text_of", "text_training"),
}  # fmt: skip
_HOMES = {name: home for home, names in _LATER.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'clearhead.models' has no attribute {name!r}")
    found = getattr(import_module(f"clearhead.models.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
