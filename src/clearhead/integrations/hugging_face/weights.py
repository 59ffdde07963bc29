"""Whether a forward is asked for the weights, and how to ask in every forward."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

__all__ = ["AttentionOutput", "weights_wanted"]


def weights_wanted(kwargs: dict[str, Any]) -> bool:
    """Whether the caller of the model wants weights: by an argument, or by a hook that collects."""
    if kwargs.get("output_attentions"):
        return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    collected = None if collector is None else collector.get()
    return any(key.endswith("attentions") for key in collected or ())


class AttentionOutput:
    """`output_attentions=True` in every forward of a model, until it is closed."""

    def __init__(self, model: nn.Module) -> None:
        self._hook = model.register_forward_pre_hook(_asking, with_kwargs=True)

    def close(self) -> None:
        """Ask no more."""
        self._hook.remove()

    def __enter__(self) -> AttentionOutput:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _asking(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if kwargs.get("output_attentions") is None:
        kwargs = {**kwargs, "output_attentions": True}
    return args, kwargs
