"""How a model is run to read its heads: without caches, logits or a decoder."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from clearhead import masks
from clearhead._capture import two_sided
from clearhead.heads.batch import Batch

__all__ = ["body_runner", "runner"]


def runner(model: nn.Module) -> Callable[[Batch], Any]:
    """Return a function that runs a model on a batch, by the argument names of its forward."""
    read: Any = cast("Any", model).get_encoder() if two_sided(model) else model
    names = inspect.signature(getattr(read, "forward", read)).parameters
    if "input_ids" not in names:
        return lambda batch: _plain(read, batch, "mask" in names)
    # Skip what is not read: caches, and the logits of all positions but the last.
    skipped = {"use_cache": False, "logits_to_keep": 1}
    fixed = {name: value for name, value in skipped.items() if name in names}

    def run(batch: Batch) -> Any:
        mask = {"attention_mask": batch.real.long()} if "attention_mask" in names else {}
        return read(input_ids=batch.tokens, **mask, **fixed)

    return run


def body_runner(model: Any) -> Callable[[Batch], Any] | None:
    """Return a function that runs a model without its head; None where no body can be told."""
    body = getattr(model, "base_model", None)
    if not isinstance(body, nn.Module) or body is model or two_sided(model):
        return None
    names = inspect.signature(model.forward).parameters
    return None if "logits_to_keep" in names else runner(body)


def _plain(model: nn.Module, batch: Batch, masked: bool) -> Any:
    if batch.padded and masked:
        return model(batch.tokens, mask=masks.keep(batch.real))
    return model(batch.tokens)
