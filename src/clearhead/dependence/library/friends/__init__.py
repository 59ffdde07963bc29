"""Other libraries than transformers: what attends in them, as small models to audit."""

from __future__ import annotations

from clearhead.dependence.library.friends.building import BuiltFriend, Friend, build
from clearhead.dependence.library.friends.diffusers_processors import catalogue as of_diffusers
from clearhead.dependence.library.friends.peft_adapters import catalogue as of_peft
from clearhead.dependence.library.friends.poolers import catalogue as of_sentence_transformers
from clearhead.dependence.library.friends.torch_modules import catalogue as of_torch
from clearhead.dependence.library.friends.x_transformers_layers import (
    catalogue as of_x_transformers,
)

__all__ = [
    "BuiltFriend",
    "Friend",
    "build",
    "of_diffusers",
    "of_peft",
    "of_sentence_transformers",
    "of_torch",
    "of_x_transformers",
]
