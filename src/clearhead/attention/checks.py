"""What `attend` accepts: each rule is checked once, and a violation says what to do.

A valid call costs a few comparisons; a message is built for an invalid one only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from clearhead._core import type_error, value_error
from clearhead.readings import Reading

Shape = tuple[int, ...]

# Other floats have no arithmetic in torch (float8, float4).
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NUMBERS = "floating-point numbers (float64, float32, bfloat16 or float16)"

_WEIGHTS = "read=readings.Weights(), which makes the answer (context, weights)"
# What an argument of another function is called here.
ELSEWHERE = {
    "is_causal": "mask=masks.causal(); where there are more sources than queries, torch's corner "
    'is masks.causal(align="start")',
    "causal": "mask=masks.causal()",
    "attn_mask": "mask= for a bool tensor, True = may attend; bias= for numbers that are added",
    "attention_mask": "mask=masks.from_huggingface(attention_mask)",
    "key_padding_mask": "mask=masks.from_multihead(None, key_padding_mask)",
    "need_weights": _WEIGHTS,
    "return_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "average_attn_weights": "readings.Weights() for all heads, and weights.mean(-3)",
    "dropout_p": "dropout=",
    "enable_gqa": "nothing: query heads may be a multiple of source heads",
    "softmax_scale": "scale=",
}


def unknown(given: Mapping[str, Any]) -> TypeError:
    """Build the error for an unknown argument, with its name here where there is one."""
    name = next(iter(given))
    hint = f"write {ELSEWHERE[name]}" if name in ELSEWHERE else None
    hint = hint or "help(clearhead.attend) lists its arguments"
    return type_error("attend", f"has no argument {name}=", hint=hint)


def inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check type, dtype, device and shape of the three tensors against each other."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        raise _no_tensor(query=query, key=key, value=value)
    if query.is_nested or key.is_nested or value.is_nested:
        # A nested tensor has no shape.
        raise _not_dense(query, key, value)
    q, k, v = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    rank = len(q)
    if (
        rank < 2
        or len(k) != rank
        or len(v) != rank
        or q[-1] != k[-1]
        or k[:-1] != v[:-1]
        or (rank > 2 and not _heads_fit(q, k))
    ):
        raise _wrong_shape(q, k, v)
    if not (query.dtype == key.dtype == value.dtype and query.dtype in FLOATS):
        raise _wrong_dtype(query, key, value)
    if not query.device == key.device == value.device:
        raise _wrong_device(query=query, key=key, value=value)
    if not query.layout == key.layout == value.layout == torch.strided:
        raise _not_dense(query, key, value)


def _heads_fit(q: Shape, k: Shape) -> bool:
    if len(q) == 3:
        return q[0] == k[0]
    return q[:-3] == k[:-3] and (q[-3] == k[-3] or (k[-3] > 0 and q[-3] % k[-3] == 0))


def _no_tensor(**tensors: Any) -> TypeError:
    name, got = next((n, x) for n, x in tensors.items() if not isinstance(x, Tensor))
    hint = "wrap it in torch.as_tensor"
    return type_error(name, "is a floating-point tensor", got=type(got).__name__, hint=hint)


def _wrong_shape(q: Shape, k: Shape, v: Shape) -> ValueError:
    shapes = {"query": q, "key": k, "value": v}
    short = next((name for name, shape in shapes.items() if len(shape) < 2), None)
    if short is not None:
        hint = "one position of one head has shape (1, head_dim)"
        rule = "has at least the axes (position, head_dim)"
        return value_error(short, rule, shapes=shapes, hint=hint)
    for name, shape in (("key", k), ("value", v)):
        if len(shape) != len(q):
            got = f"{len(shape)} beside {len(q)}"
            hint = "give all three the same leading axes; expand() copies nothing"
            return value_error(name, "has as many axes as query", got=got, shapes=shapes, hint=hint)
    argument, rule, got, hint = _wrong_axis(q, k, v)
    return value_error(argument, rule, got=got, shapes=shapes, hint=hint)


def _wrong_axis(q: Shape, k: Shape, v: Shape) -> tuple[str, str, str | None, str]:
    """Name the argument, the rule, what was got and what to do, for shapes of one rank."""
    if q[-1] != k[-1]:
        hint = "project query and key to one width; only value may have another"
        return "key", "has the head_dim (last axis) of query", f"{k[-1]} beside {q[-1]}", hint
    if k[:-1] != v[:-1]:
        return "value", "has the axes of key except the last", None, "give one value for each key"
    if len(q) == 3 or q[:-3] != k[:-3]:
        lead = -3 if len(q) > 3 else 1
        hint = "expand key and value to that batch; 3-D tensors are (batch, position, head_dim)"
        return "key", "has the batch sizes of query", f"{k[:lead]} beside {q[:lead]}", hint
    got = f"{q[-3]} query heads and {k[-3]} source heads"
    hint = "axes are (*batch, head, position, head_dim): is a transpose(1, 2) missing?"
    return "query", "has a whole multiple of the heads of key", got, hint


def _wrong_dtype(query: Tensor, key: Tensor, value: Tensor) -> TypeError:
    got = f"{query.dtype}, {key.dtype}, {value.dtype}".replace("torch.", "")
    if query.dtype == key.dtype == value.dtype:
        rule = f"are tensors of {_NUMBERS}"
        return type_error("query, key, value", rule, got=got, hint=_conversion(query.dtype))
    hint = "convert them to one dtype first"
    return type_error("query, key, value", "have one dtype", got=got, hint=hint)


def floats(name: str, given: Any, hint: str) -> None:
    """Check that an optional argument is a tensor of floats that torch can compute with."""
    if isinstance(given, Tensor) and given.dtype in FLOATS:
        return
    got = type(given).__name__
    if isinstance(given, Tensor):
        got = str(given.dtype)
        hint = _conversion(given.dtype) if given.is_floating_point() else hint
    raise type_error(name, f"is a tensor of {_NUMBERS}", got=got, hint=hint)


def _conversion(dtype: torch.dtype) -> str:
    if not dtype.is_floating_point:
        return "convert with .float() first"
    return "convert with .to(torch.bfloat16), and multiply by its scale where it has one"


def _not_dense(*tensors: Tensor) -> TypeError:
    hint = "pad to one dense tensor and use masks.lengths, or pack and use masks.document"
    got = ", ".join("nested" if x.is_nested else str(x.layout) for x in tensors)
    return type_error("query, key, value", "are dense (strided) tensors", got=got, hint=hint)


def _wrong_device(**tensors: Tensor) -> ValueError:
    got = ", ".join(f"{name} on {x.device}" for name, x in tensors.items())
    hint = "move them to one device with .to(query.device)"
    return value_error(", ".join(tensors), "are on one device", got=got, hint=hint)


def same_device(name: str, given: Tensor, query: Tensor) -> None:
    """Check that the tensor lies on the device of query, key and value."""
    if given.device != query.device:
        raise _wrong_device(query=query, **{name: given})


def wanted(read: Reading | Sequence[Reading] | None) -> tuple[Reading, ...]:
    """Return the readings asked for as a tuple."""
    if read is None:
        return ()
    if isinstance(read, Reading):
        return (read,)
    if isinstance(read, (tuple, list)) and all(isinstance(r, Reading) for r in read):
        return tuple(read)
    names = [read] if not isinstance(read, (tuple, list)) else read
    got = next(r for r in names if not isinstance(r, Reading))
    shown, hint = repr(got), "for example read=readings.Weights() or read=(readings.TopK(8), "
    hint += "readings.Entropy())"
    if isinstance(got, type):
        shown = f"the class {got.__name__}"
        hint = f"add (): {got.__name__}()" if issubclass(got, Reading) else hint
    rule = "is None, a reading, or a tuple of readings"
    raise type_error("read", rule, got=shown, hint=hint)


def number(name: str, given: Any, hint: str) -> Any:
    """Return the argument as a Python or symbolic number; numpy's scalars are numbers too."""
    if not isinstance(given, (Real, torch.SymInt, torch.SymFloat)):
        raise type_error(name, "is a number", got=type(given).__name__, hint=hint)
    if type(given) is int and abs(given) > sys.float_info.max:
        raise value_error(name, "is a number that a float can hold", hint=hint)
    # torch multiplies by Python integers of at most 64 bits.
    return float(given) if isinstance(given, Real) else given


def softcap(given: Any) -> float:
    """Check that the bound of the scores is positive and finite."""
    given = number("softcap", given, "pass a float, or None for no cap")
    if not 0 < given < math.inf:
        raise value_error("softcap", "is positive and finite", got=given, hint="None means no cap")
    return given


def dropout(given: Any) -> float:
    """Check that the argument is a probability."""
    given = number("dropout", given, "pass a probability; 0.0 drops nothing")
    if not 0 <= given <= 1:
        raise value_error(
            "dropout", "is a probability, 0 to 1", got=given, hint="0.0 drops nothing"
        )
    return given


def sinks(given: Any, query: Tensor) -> Tensor:
    """Check that there is one sink logit for each query head."""
    floats("sinks", given, "one logit for each query head, for example torch.zeros(head)")
    same_device("sinks", given, query)
    heads = query.shape[-3]
    if tuple(given.shape) != (heads,):
        raise value_error(
            "sinks",
            "has one logit for each query head, shape (head,)",
            shapes={"sinks": given, "query": query},
            hint=f"expand it to shape ({heads},)",
        )
    return given
