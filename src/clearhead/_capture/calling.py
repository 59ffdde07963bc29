"""The model that a user gives, and the inputs that it is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from clearhead._capture.modules import Modules
from clearhead._core import type_error, value_error

__all__ = ["call_with", "nothing_seen", "watchable"]


def watchable(model: Any) -> Any:
    """Give the model itself, without the wrapper of `torch.compile`; refuse what cannot be seen."""
    if not callable(model):
        raise type_error("model", "is a module or a function", got=type(model).__name__)
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise value_error(
            "model",
            "runs its replicas in threads, which one watch cannot see",
            got="torch.nn.DataParallel",
            hint="watch(model.module) and call model.module inside the block",
        )
    return getattr(model, "_orig_mod", model)


def call_with(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with a tensor, a tuple of arguments or a dict of keywords."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if hasattr(inputs, "keys"):
        return model(**inputs)
    if not isinstance(inputs, tuple | list):
        hint = (
            "encode a text first; a model of this library has model.vocabulary.encode(text)[None]"
        )
        rule = "are a tensor, a tuple of arguments or a dict of keywords"
        raise type_error("inputs", rule, got=type(inputs).__name__, hint=hint)
    return model(*inputs)


def nothing_seen(modules: Modules, notes: list[str], by: str = "watch") -> str:
    """Say why no attention call may have been seen, in the words of an error."""
    lines = [f"{by}: no attention call of the model was seen"]
    lines += [f"  {note}" for note in notes]
    if modules.elsewhere:
        lines.append("  the model ran in another thread than the watch")
        lines.append("  to do: call it in the thread of the with block")
    elif modules.names and not modules.ran:
        lines.append("  the model was not called inside the block")
    elif mixers := modules.mixers():
        lines.append("  classes that may mix positions without attention: " + ", ".join(mixers))
    elif not notes:
        lines.append("  to do: pass a model that attends; docs/watch.md says which calls are seen")
    return "\n".join(lines)
