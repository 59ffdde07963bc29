"""Attention that you can see through: who may attend to whom, who did, what difference it made.

>>> import torch, clearhead as ch
>>> q = k = v = torch.eye(2)
>>> context, weights = ch.attend(q, k, v, ch.masks.causal(), read=ch.readings.Weights())
>>> weights
tensor([[1.0000, 0.0000],
        [0.3302, 0.6698]])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clearhead._display import provide

if TYPE_CHECKING:
    from clearhead import biases, distributed, heads, integrations, masks, models, readings
    from clearhead.attention import attend
    from clearhead.dependence import assert_causal, audit, influence
    from clearhead.intervention import ablate, effects, head_importance, knockout, zero_weights
    from clearhead.layers import MultiheadAttention, convert
    from clearhead.monitoring import monitor
    from clearhead.recording import estimate, watch
    from clearhead.views import figure, record_from, view

__version__ = "0.1.0"

# In the order of the flow: block, weigh, layers, look into a model, cut, prove.
__all__ = [  # noqa: RUF022
    "masks",
    "biases",
    "readings",
    "attend",
    "distributed",
    "MultiheadAttention",
    "convert",
    "watch",
    "estimate",
    "heads",
    "knockout",
    "ablate",
    "zero_weights",
    "head_importance",
    "effects",
    "influence",
    "audit",
    "assert_causal",
    "models",
    "monitor",
    "view",
    "record_from",
    "figure",
    "integrations",
]

_HOMES = {
    "masks": "masks",
    "biases": "biases",
    "readings": "readings",
    "attend": "attention",
    "distributed": "distributed",
    "MultiheadAttention": "layers",
    "convert": "layers",
    "watch": "recording",
    "estimate": "recording",
    "heads": "heads",
    "knockout": "intervention",
    "ablate": "intervention",
    "zero_weights": "intervention",
    "head_importance": "intervention",
    "effects": "intervention",
    "influence": "dependence",
    "audit": "dependence",
    "assert_causal": "dependence",
    "models": "models",
    "monitor": "monitoring",
    "view": "views",
    "record_from": "views",
    "figure": "views",
    "integrations": "integrations",
}


def _mimebundle(shown: Any) -> dict[str, Any]:
    from clearhead.views import mimebundle

    return mimebundle(shown)


# Here, because every import of a part of the package runs this file first.
provide(_mimebundle)


def __getattr__(name: str) -> Any:
    """Import each name at its first use: the command handles Ctrl-C before torch is there."""
    if name not in _HOMES:
        from clearhead._core import errors

        also = errors.did_you_mean("" if name.startswith("_") else _meant(name))
        raise AttributeError(f"module 'clearhead' has no attribute {name!r}{also}")
    home = import_module(f"clearhead.{_HOMES[name]}")
    found = home if _HOMES[name] == name else getattr(home, name)
    globals()[name] = found
    return found


# What other libraries call it, or where one would look first.
_ELSEWHERE = {
    **dict.fromkeys(("scaled_dot_product_attention", "sdpa", "flash_attention"), "attend"),
    **dict.fromkeys(("Attention", "SelfAttention", "MHA"), "MultiheadAttention"),
    **dict.fromkeys(("GPT", "BERT", "RNN", "Characters", "load"), "models.{name}"),
    "train": "models.train, or the command `clearhead train FILE`",
    "softmax": "attend(q, k, v, read=readings.Weights())",
    "weights": "readings.Weights()",
    **dict.fromkeys(
        ("MaxLogit", "MaxLogits", "max_logit", "max_logits", "MaxAttentionLogit", "max_score"),
        "readings.MaxScore()",
    ),
    "rollout": "influence(model, inputs)",
    "attribution": "influence(model, inputs)",
    **dict.fromkeys(
        ("look", "visualize", "show", "plot"),
        "the command `clearhead look TEXT`, or view(seen) of what watch(model) saw",
    ),
    **dict.fromkeys(("trace", "hook", "capture"), "watch(model)"),
    **dict.fromkeys(("patch", "intervene"), "knockout or ablate"),
}


def _meant(name: str) -> str:
    """What somebody may have meant by a name that is not there; empty where nothing is near."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name].format(name=name)
    import difflib

    from clearhead import masks, readings

    for home in (masks, readings):
        if name in home.__all__:
            return f"{home.__name__.removeprefix('clearhead.')}.{name}"
    near = difflib.get_close_matches(name, __all__, n=2, cutoff=0.7)
    return " or ".join(near) or (f"masks.{mask}" if (mask := masks.guess(name)) else "")


def __dir__() -> list[str]:
    """List the public names, also those not yet imported."""
    return sorted({*globals(), *__all__})
