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

from clearhead import masks, readings
from clearhead.attention import attend

if TYPE_CHECKING:
    from clearhead import heads, models
    from clearhead.auditing import assert_causal, audit
    from clearhead.comparing import effects
    from clearhead.cutting import ablate, head_importance, knockout, zero_weights
    from clearhead.influencing import influence
    from clearhead.multihead import MultiheadAttention, convert
    from clearhead.watching import estimate, watch

__version__ = "0.1.0"

# In the order of the flow: block, weigh, layers, look into a model, cut, prove.
__all__ = [  # noqa: RUF022
    "masks",
    "readings",
    "attend",
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
]

_HOMES = {
    "MultiheadAttention": "multihead",
    "convert": "multihead",
    "watch": "watching",
    "estimate": "watching",
    "heads": "heads",
    "knockout": "cutting",
    "ablate": "cutting",
    "zero_weights": "cutting",
    "head_importance": "cutting",
    "effects": "comparing",
    "influence": "influencing",
    "audit": "auditing",
    "assert_causal": "auditing",
    "models": "models",
}


def __getattr__(name: str) -> Any:
    """Import what is heavy, or seldom used, at the first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'clearhead' has no attribute {name!r}")
    home = import_module(f"clearhead.{_HOMES[name]}")
    found = home if _HOMES[name] == name else getattr(home, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List the public names, also those not yet imported."""
    return sorted({*globals(), *__all__})
