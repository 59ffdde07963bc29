"""Which torch transforms and modes are active around the running call."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = ["watchers"]


def watchers() -> list[str]:
    """What looks into the running call, so that only plain torch operations can serve it.

    A compiled kernel, a shortcut that depends on stored values and a hand-written backward all
    need to know.
    """
    if torch.compiler.is_compiling():
        # What follows cannot be traced, and need not be asked.
        return ["torch.compile or torch.export is tracing the call"]
    found = []
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore
        found.append("a torch.func transform (vmap, grad, jvp, ...) is active")
    if torch._C._len_torch_dispatch_stack():
        found.append("a dispatch mode (fake tensors, make_fx, ...) is active")
    if forward_ad._current_level >= 0:
        found.append("forward-mode differentiation is active")
    if torch._C._get_tracing_state() is not None:
        found.append("torch.jit.trace is recording the call")
    return found
