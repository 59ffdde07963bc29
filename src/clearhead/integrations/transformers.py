"""`attn_implementation="clearhead"` in models of the transformers library.

>>> import clearhead as ch
>>> ch.integrations.transformers.register()  # doctest: +SKIP
>>> model = AutoModel.from_pretrained(name, attn_implementation="clearhead")  # doctest: +SKIP
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from clearhead._core import type_error, value_error
from clearhead.integrations.hugging_face import (
    NAMES,
    AttentionOutput,
    additive_mask,
    attention_function,
    reasons_of,
)

if TYPE_CHECKING:
    from clearhead.integrations.hugging_face.callback import TrainerMonitor as MonitorCallback

__all__ = ["MonitorCallback", "output_attentions", "register", "unsupported_reasons"]

# transformers looks for these in a name, and treats it as the kernel of that name.
_TAKEN = ("eager", "sdpa", "flash", "flex", "paged")


def register(name: str = "clearhead") -> None:
    """Let `attn_implementation=name` compute the attention of transformers models with `attend`.

    It registers the attention function and the mask function: without a mask function of its own,
    a model would get no mask at all. Outputs equal those of "eager" to rounding, in training and
    in generation with every kind of cache; a query that may attend to nothing gets context 0. At
    the first call of each module the result is compared with the module's own eager attention, so
    that a model that computes anything else is refused with a ValueError, as is one that decides by
    the name of the implementation or has attention of its own (see `unsupported_reasons`).

    `output_attentions=True` returns the weights, in the same pass and before dropout.
    """
    masking, modeling = _libraries()
    if not isinstance(name, str):
        raise type_error("name", "is a string", got=type(name).__name__)
    if not re.fullmatch(r"[A-Za-z]\w*", name) or any(word in name.lower() for word in _TAKEN):
        rule = f"is a word without {', '.join(_TAKEN[:-1])} or {_TAKEN[-1]} in it"
        hint = "transformers treats such names as kernels of its own"
        raise value_error("name", rule, got=repr(name), hint=hint)
    known = modeling.ALL_ATTENTION_FUNCTIONS.get(name)
    if known not in (None, attention_function):
        raise value_error(
            "name", "is registered already, for another function", got=f"{name!r}: {known}"
        )
    NAMES.add(name)
    modeling.AttentionInterface.register(name, attention_function)
    masking.AttentionMaskInterface.register(name, additive_mask)


def output_attentions(model: nn.Module) -> AttentionOutput:
    """Return the weights from every forward of a model, as `config.output_attentions = True` would.

    transformers refuses that setting for every implementation but "eager". This one works as a
    context manager, or until `close()`; a forward that is given `output_attentions` itself keeps
    what it is given.
    """
    if not isinstance(model, nn.Module):
        raise type_error("model", "is a module", got=type(model).__name__)
    used = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if used != "eager" and used not in NAMES:
        raise value_error(
            "model",
            "needs an attn_implementation that returns weights",
            got=repr(used),
            hint='model.set_attn_implementation("clearhead"), after register()',
        )
    return AttentionOutput(model)


def unsupported_reasons(model: nn.Module | type[nn.Module]) -> list[str]:
    """Give the reasons why a model, or its class, cannot be served; none that its source shows: [].

    A model with attention of its own ignores `attn_implementation`. Where it asks for a mask it is
    refused at its first forward; where it does not, nothing of this library is called, and only
    this function says so.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        sources = {model.__module__}
    elif isinstance(model, nn.Module):
        sources = {type(module).__module__ for module in model.modules()}
    else:
        raise type_error("model", "is a module or its class", got=repr(model))
    return [reason for name in sorted(sources) for reason in reasons_of(name)]


def _libraries() -> tuple[Any, Any]:
    try:
        from transformers import masking_utils, modeling_utils
    except ImportError as error:
        raise ImportError(
            "integrations need transformers 5 or later; to do: pip install 'clearhead[hf]'"
        ) from error
    return masking_utils, modeling_utils


def __getattr__(name: str) -> Any:
    """Make the callback at its first use: its base class is one of transformers."""
    if name != "MonitorCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _libraries()
    from clearhead.integrations.hugging_face.callback import TrainerMonitor

    return TrainerMonitor
