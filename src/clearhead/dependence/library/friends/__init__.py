"""Other libraries than transformers: what attends in them, as small models to audit."""

from __future__ import annotations

from clearhead.dependence.library.friends.building import BuiltFriend, Friend, build
from clearhead.dependence.library.friends.of_torch import catalogue as of_torch

__all__ = ["BuiltFriend", "Friend", "build", "of_torch"]
