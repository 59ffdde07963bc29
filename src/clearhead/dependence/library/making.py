"""Tiny models with random weights of any class of transformers, from configurations alone.

The recipe, which every script of a finding repeats in plain torch (`recipe` writes it):

    torch.manual_seed(seed)
    model = Class._from_config(Config(**config), attn_implementation=backend, dtype=torch.float32)
    for p in model.eval().parameters():
        if p.requires_grad:
            p.data += torch.randn_like(p) * (scale / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.2)
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.dependence.library.exceptions import CAUSAL, CONFIGS, UNBUILDABLE, VARIANTS, WHOLE
from clearhead.dependence.library.shrinking import VOCABULARY, merged, shrunk
from clearhead.dependence.library.subjects import Subject, subject_named

__all__ = ["Built", "NotBuilt", "build", "recipe"]

# Positions of the audited stream, and of what an encoder reads: longer than every window.
LENGTH, ENCODER_LENGTH = 24, 17
# Some models take an id of 0 for padding, whatever their configuration says.
LOWEST = 3
# Weights are drawn with a standard deviation of SCALE / sqrt(inputs): scores far from uniform.
SCALE = 1.5


class NotBuilt(Exception):
    """No model of a class could be built here, for the reason it gives."""


class Built(NamedTuple):
    """A tiny model in eval mode, its inputs, and the plain data that build it again."""

    model: nn.Module
    inputs: dict[str, Any]
    stream: str
    vocabulary: int
    notes: tuple[str, ...]
    class_name: str
    config_class: str
    config: dict[str, Any]
    backend: str
    seed: int
    scale: float
    lowest: int = LOWEST  # ids below are special to some class, those from `vocabulary` on to most


def build(
    subject: Subject | str,
    backend: str = "eager",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Built:
    """Build a tiny model of a class with seeded random weights; nothing is downloaded.

    The inputs are keyword arguments with two samples of real tokens; the positions of
    `inputs[stream]` are those to audit, and ids below `vocabulary` are no special tokens.
    """
    subject = subject_named(subject) if isinstance(subject, str) else subject
    if subject.name in UNBUILDABLE:
        raise NotBuilt(UNBUILDABLE[subject.name])
    kind = _class_of(subject)
    if backend == "sdpa" and not getattr(kind, "_supports_sdpa", False):
        raise NotBuilt(f"{subject.class_name} does not support attn_implementation='sdpa'")
    config, notes = _plan(kind, subject)
    with torch.random.fork_rng(devices=[]), _reasons():
        model = _model(kind, config, backend, seed)
        inputs = _inputs(model, seed)
    return Built(
        model.to(dtype),
        inputs,
        "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids",
        VOCABULARY,
        notes,
        subject.class_name,
        kind.config_class.__name__,
        config,
        backend,
        seed,
        SCALE,
    )


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    """Name what is missing: a package, or a backend that a part of the model does not support."""
    try:
        yield
    except ImportError as error:
        raise NotBuilt(" ".join(str(error).split())) from error
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        part = str(error).partition(" ")[0]
        raise NotBuilt(f"{part} does not support attn_implementation='sdpa'") from error


def _class_of(subject: Subject) -> Any:
    # Read when the libraries below are imported: no class of a mapping needs the hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    kind = getattr(transformers, subject.class_name, None)
    if kind is None:
        raise NotBuilt(f"transformers {transformers.__version__} has no {subject.class_name}")
    return kind


def _plan(kind: Any, subject: Subject) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments of the configuration, and those of them that are no sizes, in words."""
    name, _, variant = subject.name.partition(":")
    if name in WHOLE:
        return WHOLE[name], ()
    default = kind.config_class()
    changes = dict(VARIANTS[name][variant]) if variant else {}
    if subject.mapping == "causal":
        changes |= {"is_decoder": True} if hasattr(default, "is_decoder") else {}
        changes |= CAUSAL.get(default.model_type, {})
    noted = CONFIGS.get(default.model_type, {}) | changes
    return merged(shrunk(default), changes), tuple(f"{n}={v!r}" for n, v in noted.items())


def _model(kind: Any, config: dict[str, Any], backend: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # Some configurations take entries out of the dicts that they are given.
    made = kind.config_class(**copy.deepcopy(config))
    model = kind._from_config(made, attn_implementation=backend, dtype=torch.float32)
    for p in model.eval().parameters():
        if p.requires_grad:
            p.data += torch.randn_like(p) * (SCALE / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.2)
    return model


def _inputs(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    takes = inspect.signature(model.forward).parameters
    both = "decoder_input_ids" in takes
    length = ENCODER_LENGTH if both else LENGTH
    inputs = {"input_ids": torch.randint(LOWEST, VOCABULARY, (2, length), generator=generator)}
    if both:
        tokens = torch.randint(LOWEST, VOCABULARY, (2, LENGTH), generator=generator)
        inputs["decoder_input_ids"] = tokens
    return inputs


def recipe(built: Built) -> list[str]:
    """Write the lines of Python that build the model again, with torch and transformers alone."""
    made = f"transformers.{built.config_class}(**{built.config!r})"
    return [
        f"torch.manual_seed({built.seed})",
        f"model = transformers.{built.class_name}._from_config({made}, "
        f"attn_implementation={built.backend!r}, dtype=torch.float32).eval()",
        "for p in (p for p in model.parameters() if p.requires_grad):",
        f"    p.data += torch.randn_like(p) * ({built.scale} / p.shape[-1] ** 0.5 "
        "if p.ndim > 1 else 0.2)",
    ]
