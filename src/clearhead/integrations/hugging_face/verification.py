"""At its first call, each attention module is compared with its own eager attention."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from clearhead._core import readable, unobserved, value_error
from clearhead.integrations.hugging_face.source import refuse

__all__ = ["InterfaceInputs", "is_verified", "verify"]

# The attribute of a module that was verified; compiled code guards on it.
_NOTE = "_clearhead_verified"
# Scores computed at most in full; of larger maps the last rows are compared.
_SCORES, _ROWS = 1 << 20, 16

Attend = Callable[..., tuple[Tensor, Any]]


class InterfaceInputs(NamedTuple):
    """What a model hands to its attention function."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]


Verify = Callable[[Attend, nn.Module, InterfaceInputs], None]


def is_verified(module: nn.Module) -> bool:
    """Whether a module has been verified."""
    return getattr(module, _NOTE, False)


def _verify(attend: Attend, module: nn.Module, inputs: InterfaceInputs) -> None:
    """Raise a ValueError unless the module's own eager attention computes the same context.

    Without values (on the meta device, under a transform of `torch.func`) that waits for a later
    call.
    """
    refuse(type(module).__module__.rpartition(".")[0])
    if not readable(inputs.query):
        return
    with torch.no_grad():
        _compare(attend, module, inputs)
    vars(module)[_NOTE] = True


def _compare(attend: Attend, module: nn.Module, inputs: InterfaceInputs) -> None:
    eager = _eager(module)
    query, key, value, mask, options = _few_rows(inputs)
    wide = (_wide(query), _wide(key), _wide(value))
    # Nobody who intercepts the model's calls sees these.
    hidden = torch._C.DisableTorchFunction(), unobserved(query)
    with hidden[0], hidden[1], torch.autocast(query.device.type, enabled=False):
        ours, _ = attend(*wide, mask, **options)
        theirs, *_ = eager(module, *wide, _added(mask), **{"dropout": 0.0, **_given(options)})
    error, rounding = _difference(ours, theirs, mask), _rounding(*wide, options)
    if not error <= rounding:
        name = type(module).__name__
        raise value_error(
            "attn_implementation",
            f"{name}'s eager attention computes something else than softmax(scores) @ value",
            got=f"a difference of {error:.2g}, where rounding makes at most {rounding:.2g}",
            hint='use "eager", and clearhead.watch(model) to read its weights',
        )


def _eager(module: nn.Module) -> Callable[..., Any]:
    """Find the function that the module names as its default beside the attention interface."""
    forward = inspect.unwrap(type(module).forward)
    home = vars(sys.modules[type(module).__module__])
    names = [n for n in forward.__code__.co_names if "eager_attention_forward" in n]
    found = home.get((names or ["eager_attention_forward"])[0])
    if not callable(found):
        raise value_error(
            "attn_implementation",
            f"{type(module).__name__} names no eager_attention_forward to verify the result with",
            hint='use "eager" or "sdpa", and clearhead.watch(model) to read its weights',
        )
    return found


def _few_rows(inputs: InterfaceInputs) -> InterfaceInputs:
    """Keep the last queries of a large map, and what belongs to them."""
    query, key, _, mask, options = inputs
    rows, source = query.shape[2], key.shape[2]
    if rows <= _ROWS or query.shape[:3].numel() * source <= _SCORES:
        return inputs

    def last(x: Any) -> Any:
        return x[..., -_ROWS:, :] if isinstance(x, Tensor) and x.shape[-2] == rows else x

    bias = {"position_bias": last(options.get("position_bias"))}
    return inputs._replace(query=last(query), mask=last(mask), options=options | bias)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "mps" else x.double()


def _added(mask: Tensor | None) -> Tensor | None:
    """Give a bool mask in the form that eager attention adds."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(
        ~mask, torch.finfo(torch.float32).min
    )


def _given(options: dict[str, Any]) -> dict[str, Any]:
    # An eager attention has defaults of its own.
    return {name: option for name, option in options.items() if option is not None}


def _difference(ours: Tensor, theirs: Tensor, mask: Tensor | None) -> float:
    """Give the largest difference over the rows that may attend to anything."""
    if ours.shape != theirs.shape:
        return float("inf")
    error = (ours - theirs).abs()
    if mask is not None:
        lowest = 0 if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        rows = (mask > lowest).any(-1, keepdim=True).transpose(1, 2)
        error = error.masked_fill(~rows, 0)
    return float(error.max()) if error.numel() else 0.0


def _rounding(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> float:
    """Bound the error of a softmax in float32: relative to the scores, and to the values."""
    if not query.numel() or not key.numel():
        return 0.0
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(torch.as_tensor(scale).abs().max())
    scores = scale * float(query.norm(dim=-1).max() * key.norm(dim=-1).max())
    bias = options.get("position_bias")
    scores += 0.0 if bias is None else float(bias.abs().max())
    return 8 * torch.finfo(torch.float32).eps * (1 + scores) * float(value.abs().max())


# Compiled code breaks its graph for it, once: the guard on the note fails after that.
verify = cast(Verify, torch.compiler.disable(_verify))
