"""The hooks of a monitor on its model, which neither copies nor files of the model take along."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["Hooks"]


class _Hook:
    """Calls a method of its owner; a copy of it does nothing."""

    def __init__(self, owner: Any = None, name: str = "") -> None:
        self.owner, self.name = owner, name

    @torch.compiler.disable
    def __call__(self, *args: Any) -> None:
        if self.owner is not None:
            getattr(self.owner, self.name)(*args)

    def __reduce__(self) -> Any:
        return _Hook, ()

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook()


class Hooks:
    """Calls `starts` and `ends` of the owner around forwards of a model, `stepped` after steps."""

    def __init__(self, model: nn.Module, owner: Any) -> None:
        starts, ends, stepped = (_Hook(owner, name) for name in ("starts", "ends", "stepped"))
        self._handles: list[Any] = [
            model.register_forward_pre_hook(starts, prepend=True, with_kwargs=True),
            model.register_forward_hook(ends, with_kwargs=True, always_call=True),
            register_optimizer_step_post_hook(stepped),
        ]

    def remove(self) -> None:
        """Take the hooks off; again does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
