"""The attention interface of `transformers`: tensors before any repeat, whatever the backend."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, overrides

from clearhead import masks
from clearhead._watch.call import Call, from_sdpa
from clearhead._watch.intercept import Frame, Interceptor

__all__ = ["interface"]


@contextlib.contextmanager
def interface(seer: Interceptor) -> Iterator[None]:
    """Let every attention function that a model of `transformers` looks up tell the seer first.

    The function itself stays the model's own, on the backend that it chose.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    kind: Any = getattr(modeling, "AttentionInterface", None)
    if kind is None:
        yield
        return
    own = kind.get_interface

    @functools.wraps(own)
    def get_interface(self: Any, name: Any, default: Any) -> Any:
        return _telling(seer, str(name), own(self, name, default))

    kind.get_interface = get_interface
    try:
        yield
    finally:
        kind.get_interface = own


def _telling(seer: Interceptor, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    opaque = name.startswith(("flash", "flex", "paged|flash"))

    @functools.wraps(function)
    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not seer.here or not seer.listening:
            return function(module, query, key, value, *args, **kwargs)
        frame = Frame(seer.modules.named(module), name == "sdpa", query, key, value)
        seer.frames.append(frame)
        try:
            if opaque:
                call = _described(seer, name, module, query, key, value, *args, **kwargs)
                return _opaque(
                    seer, call, lambda: function(module, query, key, value, *args, **kwargs)
                )
            answer = function(module, query, key, value, *args, **kwargs)
            if not frame.seen:
                seer.handler.unseen(frame.name, f"the attention function {name!r} hides its calls")
            return answer
        finally:
            seer.frames.pop()

    return attend


def _described(
    seer: Interceptor,
    name: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *_: Any,
    **kwargs: Any,
) -> Call:
    """Put a call of a kernel that says nothing of itself into clearhead's terms."""
    bias = kwargs.get("position_bias")
    scale, softcap = kwargs.get("scaling"), kwargs.get("softcap")
    tensor = attention_mask if isinstance(attention_mask, Tensor) else None
    if tensor is not None and tensor.ndim == 2:
        tensor = tensor.bool()[:, None, None, -key.shape[2] :]
    elif tensor is not None:
        tensor = tensor[..., : key.shape[2]]
    causal = name.startswith("flash") and kwargs.get(
        "is_causal", getattr(module, "is_causal", True)
    )
    call = from_sdpa(query, key, value, tensor, scale=scale, enable_gqa=True, split=seer.split)
    mask = call.mask
    for more in _more_masks(attention_mask, causal, kwargs.get("sliding_window"), name):
        mask = more if mask is None else mask & more
    if bias is not None:
        bias = bias[..., : key.shape[2]]
        bias = bias if call.bias is None else bias + call.bias
    call = call.but(
        mask=mask,
        bias=call.bias if bias is None else bias,
        softcap=softcap,
        sinks=kwargs.get("s_aux"),
        dropout=kwargs.get("dropout") or 0.0,
        how=name,
    )
    return seer.place(call, seer.roots(query, key))


def _more_masks(block: Any, causal: bool, window: int | None, name: str) -> Iterator[masks.Mask]:
    if hasattr(block, "mask_mod"):
        yield masks.where(block.mask_mod)
    if causal:
        yield masks.causal()
    if window is not None and name.startswith("flash"):
        yield masks.window(window)


def _opaque(seer: Interceptor, call: Call, run: Callable[[], Any]) -> Any:
    """Run a kernel outside the watched world; its context is (batch, query, head, value_dim)."""
    rest: list[Any] = []

    def context() -> Tensor:
        with _unwatched():
            mixed, *others = run()
        rest.extend(others)
        return mixed.transpose(1, 2)

    assert call.query is not None
    assert call.value is not None
    shape = (*call.query.shape[:3], call.value.shape[-1])
    mixed = seer.fused(call, context, shape, call.query)
    return (mixed.transpose(1, 2), *(rest or [None]))


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Let compiled kernels run as they would outside the block.

    They are compiled anew where a mode, or even a flag that turns modes off, is not as it was; so
    the modes are taken off their stack, and the forced eager stance is lifted.
    """
    with contextlib.ExitStack() as stack:
        while isinstance(overrides._get_current_function_mode(), Interceptor):
            stack.enter_context(overrides._pop_mode_temporarily())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("default"))
        yield
