"""The modes of a model that `audit.modes` compares, put on a copy of it and into a script."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

__all__ = ["in_mode", "mode_lines", "mode_options"]

WEIGHTS = "weights requested"


def in_mode(model: nn.Module, mode: str) -> Any:
    """Put a copy of the model into a mode."""
    twin: Any = copy.deepcopy(model)
    if mode in ("eager", "sdpa"):
        twin.set_attn_implementation(mode)
    if mode == "train":
        for module in twin.train().modules():
            held = vars(module)
            rates = [name for name, value in held.items() if type(value) is float]
            held.update({k: 0.0 for k in rates if "drop" in k or k == "p"})
    return twin


def mode_options(mode: str) -> str:
    """The argument that a mode adds to a call."""
    return ", output_attentions=True" if mode == WEIGHTS else ""


def mode_lines(mode: str) -> tuple[str, ...]:
    """Put `model` into a mode, in a script."""
    if mode in ("eager", "sdpa"):
        return (f'model.set_attn_implementation("{mode}")',)
    if mode == "train":
        return (
            "for m in model.train().modules():",
            "    vars(m).update({k: 0.0 for k, v in vars(m).items()"
            ' if type(v) is float and ("drop" in k or k == "p")})',
        )
    return ()
