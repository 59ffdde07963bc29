"""Which torch transforms and modes are active around the running call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

__all__ = [
    "active_transforms",
    "has_values",
    "is_mapped",
    "plain",
    "readable",
    "traced_transform",
    "unobserved",
]

# Every call checks these; a global name is found faster than a chain of attributes.
_is_compiling = torch.compiler.is_compiling
_functorch_stack = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
_is_functorch_tensor = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
_is_batched = torch._C._functorch.is_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]
_unwrapped = torch._C._functorch.get_unwrapped  # pyright: ignore[reportAttributeAccessIssue]
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_jit_trace = torch._C._get_tracing_state
_NOTHING = contextlib.nullcontext()


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


@torch.compiler.assume_constant_result
def traced_transform() -> bool:
    """Whether torch.compile is tracing inside of a torch.func transform.

    While it traces one, the transform is active in Python too; whether it is never changes within
    a trace, so that this need not be traced itself.
    """
    return _functorch_stack() is not None


def readable(values: Tensor) -> bool:
    """Whether Python may read the values now: not while they are traced, mapped or fake."""
    return (
        not _is_compiling()
        and type(values) in (Tensor, torch.nn.Parameter)
        and not values.is_meta
        and not _is_functorch_tensor(values)
        and not _count_dispatch_modes()
    )


def is_mapped(tensor: Tensor) -> bool:
    """Whether `torch.vmap` maps over a tensor, so that nobody may read its values."""
    while _is_functorch_tensor(tensor):
        if _is_batched(tensor):
            return True
        tensor = _unwrapped(tensor)
    return False


def plain(tensor: Tensor) -> Tensor:
    """Give the values of a tensor without the wrappers of `torch.func`, and without its subclass.

    Subclasses that are more than a tensor with another name, as fake tensors, stay what they are.
    """
    while _is_functorch_tensor(tensor):
        tensor = _unwrapped(tensor)
    if type(tensor) is Tensor or is_traceable_wrapper_subclass(tensor):
        return tensor  # pyright: ignore[reportReturnType]
    return tensor if _dispatches(tensor) else tensor.as_subclass(Tensor)


def unobserved(values: Tensor) -> contextlib.AbstractContextManager[None]:
    """Hide operations on these values from dispatch modes, as those that count operations, and
    from transforms of `torch.func`.

    Not from those under which there are no values: fake tensors have only shapes.
    """
    if _functorch_stack() is None and not _count_dispatch_modes():
        return _NOTHING
    return _hidden(values)


@contextlib.contextmanager
def _hidden(values: Tensor) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if _functorch_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if _count_dispatch_modes() and has_values(values):
            stack.enter_context(_disable_current_modes())
        yield


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values, whoever may read them: not on the meta device, nor fake."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake is None and not tensor.is_meta and not _dispatches(tensor)


def _dispatches(tensor: Tensor) -> bool:
    """Whether the subclass of a tensor computes operations by itself."""
    own = getattr(type(tensor), "__torch_dispatch__", None)
    return own is not torch._C._disabled_torch_dispatch_impl
