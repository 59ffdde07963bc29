"""The hooks of a monitor on its model, which neither copies nor files of the model take along."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["Hooks"]


class _Hook:
    """Calls a method of its owner; a copy of it does nothing."""

    def __init__(self, method: Any = None) -> None:
        # Imports torch's compiler, which optimizers do as well: not before there is a monitor.
        self.method = None if method is None else torch.compiler.disable(method)

    def __call__(self, *args: Any) -> None:
        if self.method is not None:
            self.method(*args)

    def __reduce__(self) -> Any:
        return _Hook, ()

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook()


class Hooks:
    """Calls `starts` and `ends` of the owner around forwards of a model, `stepped` after steps."""

    def __init__(self, model: nn.Module, owner: Any) -> None:
        starts, ends, stepped = map(_Hook, (owner.starts, owner.ends, owner.stepped))
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
