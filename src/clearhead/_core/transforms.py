"""Which torch transforms and modes are active around the running call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["active_transforms", "readable"]

# Every call checks these; a global name is found faster than a chain of attributes.
_is_compiling = torch.compiler.is_compiling
_functorch_stack = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
_is_functorch_tensor = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_jit_trace = torch._C._get_tracing_state


def active_transforms() -> list[str]:
    """List the transforms and modes around the running call; plain torch operations serve them all.

    A compiled kernel, a shortcut that depends on stored values and a handwritten backward do not.
    """
    if _is_compiling():
        # The checks below cannot be traced, and are not needed.
        return ["torch.compile or torch.export is tracing the call"]
    found = []
    if _functorch_stack() is not None:
        found.append("a torch.func transform (vmap, grad, jvp, ...) is active")
    if _count_dispatch_modes():
        found.append("a dispatch mode (fake tensors, make_fx, ...) is active")
    if forward_ad._current_level >= 0:
        found.append("forward-mode differentiation is active")
    if _jit_trace() is not None:
        found.append("torch.jit.trace is recording the call")
    return found


def readable(values: Tensor) -> bool:
    """Whether Python may read the values now: not while they are traced, mapped or fake."""
    return (
        not _is_compiling()
        and type(values) in (Tensor, torch.nn.Parameter)
        and not values.is_meta
        and not _is_functorch_tensor(values)
        and not _count_dispatch_modes()
    )
