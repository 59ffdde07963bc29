"""What `attend` accepts: every rule once, and for each breach what was got and what to do.

The checks of a right call are few comparisons; a message is only built for a wrong one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead import masks
from clearhead._core import active_transforms, type_error, value_error, warn
from clearhead.attention.problem import Problem
from clearhead.masks import MAY_ATTEND, Mask, no_mask, only_ones_and_zeros
from clearhead.readings import Reading, Scores, Weights

# Below this nobody asks how much memory is free.
SMALL = 1 << 26
_WEIGHTS = "read=readings.Weights(), which makes the answer (context, weights)"
# What other functions call it, and how it is said here.
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
    """Say how an argument of another function is said here."""
    name = next(iter(given))
    hint = f"write {ELSEWHERE[name]}" if name in ELSEWHERE else None
    hint = hint or "help(clearhead.attend) lists its arguments"
    return type_error("attend", f"has no argument {name}=", hint=hint)


def inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check type, dtype, device and shape of the three tensors against each other."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        raise _no_tensor(query=query, key=key, value=value)
    if query.is_nested or key.is_nested or value.is_nested:
        # One of them has no shape to ask for.
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
    if not (query.dtype == key.dtype == value.dtype and query.is_floating_point()):
        raise _wrong_dtype(query, key, value)
    if not query.device == key.device == value.device:
        raise _wrong_device(query=query, key=key, value=value)
    if not query.layout == key.layout == value.layout == torch.strided:
        raise _not_dense(query, key, value)


def _heads_fit(q: tuple[int, ...], k: tuple[int, ...]) -> bool:
    if len(q) == 3:
        return q[0] == k[0]
    return q[:-3] == k[:-3] and (q[-3] == k[-3] or (k[-3] > 0 and q[-3] % k[-3] == 0))


def _no_tensor(**tensors: Any) -> TypeError:
    name, got = next((n, x) for n, x in tensors.items() if not isinstance(x, Tensor))
    hint = "wrap it in torch.as_tensor"
    return type_error(name, "is a floating-point tensor", got=type(got).__name__, hint=hint)


def _wrong_shape(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> ValueError:
    shapes = {"query": q, "key": k, "value": v}
    for name, shape in shapes.items():
        if len(shape) < 2:
            hint = "one position of one head has shape (1, head_dim)"
            return value_error(
                name, "has at least the axes (position, head_dim)", shapes=shapes, hint=hint
            )
    for name, shape in (("key", k), ("value", v)):
        if len(shape) != len(q):
            return value_error(
                name,
                "has as many axes as query",
                got=f"{len(shape)} beside {len(q)}",
                shapes=shapes,
                hint="give all three the same leading axes; expand() copies nothing",
            )
    if q[-1] != k[-1]:
        return value_error(
            "key",
            "has the head_dim (last axis) of query",
            got=f"{k[-1]} beside {q[-1]}",
            shapes=shapes,
            hint="project query and key to one width; only value may have another",
        )
    if k[:-1] != v[:-1]:
        return value_error(
            "value",
            "has the axes of key except the last",
            shapes=shapes,
            hint="give one value for each key",
        )
    if len(q) == 3 or q[:-3] != k[:-3]:
        return value_error(
            "key",
            "has the batch sizes of query",
            got=f"{k[: -3 if len(q) > 3 else 1]} beside {q[: -3 if len(q) > 3 else 1]}",
            shapes=shapes,
            hint="expand key and value to that batch; 3-D tensors are (batch, position, head_dim)",
        )
    return value_error(
        "query",
        "has a whole multiple of the heads of key",
        got=f"{q[-3]} query heads and {k[-3]} source heads",
        shapes=shapes,
        hint="axes are (*batch, head, position, head_dim): is a transpose(1, 2) missing?",
    )


def _wrong_dtype(query: Tensor, key: Tensor, value: Tensor) -> TypeError:
    got = f"{query.dtype}, {key.dtype}, {value.dtype}".replace("torch.", "")
    if query.dtype == key.dtype == value.dtype:
        hint = "convert with .float() first"
        return type_error("query, key, value", "are floating-point tensors", got=got, hint=hint)
    hint = "convert them to one dtype first"
    return type_error("query, key, value", "have one dtype", got=got, hint=hint)


def _not_dense(*tensors: Tensor) -> TypeError:
    hint = "pad to one dense tensor and use masks.lengths, or pack and use masks.document"
    got = ", ".join("nested" if x.is_nested else str(x.layout) for x in tensors)
    return type_error("query, key, value", "are dense (strided) tensors", got=got, hint=hint)


def _wrong_device(**tensors: Tensor) -> ValueError:
    got = ", ".join(f"{name} on {x.device}" for name, x in tensors.items())
    hint = "move them to one device with .to(query.device)"
    return value_error(", ".join(tensors), "are on one device", got=got, hint=hint)


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


def readings(wanted: tuple[Reading, ...], problem: Problem) -> None:
    """Check each reading against the sizes, and the large ones against the free memory."""
    sizes = problem.sizes
    for reading in wanted:
        reading.check(sizes)
    maps = sum(isinstance(reading, (Weights, Scores)) for reading in wanted)
    if maps:
        _maps_fit(maps, problem)


def _maps_fit(maps: int, problem: Problem) -> None:
    lead, source = problem.query.shape[:-1], problem.key.shape[-2]
    item = 8 if problem.dtype == torch.float64 else 4
    needed = maps * math.prod(lead) * source * item
    if needed < SMALL or torch.compiler.is_compiling():
        return
    free = free_bytes(problem.query.device)
    if free is not None and needed > free:
        raise value_error(
            "read",
            "weights and scores of all edges must fit in memory",
            got=f"{needed:,} bytes, with {free:,} free",
            shapes={"weights": (*lead, source)},
            hint="ask for what you need of them: Rows(queries), TopK(k), Received(), Mass(edges), "
            "BlockMap(cells), Entropy() and LogSumExp() take no such memory",
        )


def free_bytes(device: torch.device) -> int | None:
    """How many bytes can still be allocated there; None where nobody knows (meta)."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu":
        return None
    known = [_meminfo(), _cgroup()]
    return min((size for size in known if size is not None), default=None)


def _meminfo() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup() -> int | None:
    """What a container's limit leaves; file caches can be given back."""
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if not limit.strip().isdigit() or not used.strip().isdigit():
        return None
    stat = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
    return int(limit) - int(used) + int(stat.get("inactive_file", 0))


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""


def mask(given: Any, query: Tensor, problem: Problem) -> Mask:
    """Return the mask as a `Mask` whose sizes fit; `query` is as the caller passed it."""
    if isinstance(given, Mask):
        given.check(problem.sizes)
        return given
    if not isinstance(given, Tensor):
        raise no_mask("mask", given)
    if given.dtype != torch.bool:
        raise _no_bool(given)
    _same_device("mask", given, problem)
    whole = _with_head("mask", given, query, problem)
    warn_if_backwards(given)
    return masks.dense(_flat_batch(whole, problem))


def warn_if_backwards(given: Tensor) -> None:
    """Warn of a bool mask by which each query reads only what lies after it.

    So looks a causal mask in which True means "blocked". Few rows of it are looked at, and only
    where that waits for no device.
    """
    size = given.shape[-1] if given.ndim > 1 else 0
    if size < 2 or given.shape[-2] != size or not _at_hand(given) or _corner(given):
        return
    edges = given[(0,) * (given.ndim - 2)]
    if not edges[0, 1:].all() or edges[-1].any():
        return
    if edges.diagonal().any() or not edges.diagonal(1).all() or edges.diagonal(-1).any():
        return
    warn(
        "mask",
        "by it each query reads only what lies after it: True means that it may attend",
        shapes={"mask": given},
        hint="~mask, or masks.from_multihead(mask), where True meant blocked; "
        "~masks.causal() where this is meant",
    )


def _at_hand(given: Tensor) -> bool:
    """Whether its numbers can be looked at now, without waiting for a device."""
    plain = type(given) in (Tensor, torch.nn.Parameter) and given.is_cpu and given.numel() > 0
    return plain and not active_transforms()


def _corner(given: Tensor) -> float:
    """Its first number, in one step: this is asked in every call."""
    return given.as_strided((), ()).item()


def _no_bool(given: Tensor) -> TypeError:
    if only_ones_and_zeros(given):
        hint = "mask.bool() if 1 means may attend, ~mask.bool() if 1 means blocked"
    elif given.is_floating_point():
        hint = "pass it as bias= to add it to the scores; masks.from_additive reads a 0/-inf mask"
    else:
        hint = "say which number means may attend, for example mask == 1"
    return type_error(
        "mask",
        MAY_ATTEND,
        got=str(given.dtype).replace("torch.", ""),
        shapes={"mask": given},
        hint=hint,
    )


def bias(given: Any, query: Tensor, problem: Problem) -> Tensor:
    """Return the bias with a head axis where it has one to broadcast over."""
    if not isinstance(given, Tensor) or not given.is_floating_point():
        got = str(given.dtype) if isinstance(given, Tensor) else type(given).__name__
        hint = "a bool tensor of edges belongs into mask="
        raise type_error("bias", "is a floating-point tensor", got=got, hint=hint)
    _same_device("bias", given, problem)
    _warn_of_disguise(given)
    return _with_head("bias", given, query, problem)


def _warn_of_disguise(given: Tensor) -> None:
    """Warn of a bias of zeros and ones, which blocks nothing; a learned one may hold anything."""
    if given.requires_grad or not _at_hand(given) or _corner(given) not in (0, 1):
        return
    low, high = torch.aminmax(given.detach())
    if low == 0 and high == 1 and only_ones_and_zeros(given):
        warn(
            "bias",
            "of zeros and ones adds 1 to some scores, and blocks nothing",
            shapes={"bias": given},
            hint="mask=bias.bool() if 1 means may attend, mask=~bias.bool() if 1 means blocked",
        )


def _with_head(name: str, given: Tensor, query: Tensor, problem: Problem) -> Tensor:
    """Check that the tensor broadcasts to the scores, and put in the head axis of 3-D inputs."""
    target = (*query.shape[:-1], problem.key.shape[-2])
    shape = tuple(given.shape)
    at = len(target) - len(shape)
    if at < 0 or any(size not in (1, full) for size, full in zip(shape, target[at:], strict=True)):
        axes = {2: "(query, source)", 3: "(batch, query, source)"}
        raise value_error(
            name,
            f"broadcasts to {axes.get(len(target), '(*batch, head, query, source)')}",
            shapes={name: shape, "scores": target, "query": query},
            hint=_fitting(given, target),
        )
    return given.unsqueeze(-3) if query.ndim == 3 and given.ndim == 3 else given


def _fitting(given: Tensor, target: tuple[int, ...]) -> str:
    rows = len(target) > 2 and tuple(given.shape) == (target[0], target[-1])
    if rows and given.dtype == torch.bool:
        return (
            "masks.keep(mask) takes (batch, source), True = real; a tensor of one row for "
            "each sample needs axes of 1 for heads and queries"
        )
    return (
        "make each axis 1 or the size of the scores; a mask of one row for each sample needs axes "
        "of 1 for heads and queries, or masks.keep(real)"
    )


def _flat_batch(whole: Tensor, problem: Problem) -> Tensor:
    """Return (query, source) or (batch or 1, head or 1, query, source), as masks know them."""
    query, source = problem.query.shape[-2], problem.key.shape[-2]
    if whole.ndim < 3:
        return whole.expand(query, source)
    whole = whole.expand(*whole.shape[:-2], query, source)
    if whole.ndim == 3:
        return whole.unsqueeze(0)
    if all(size == 1 for size in whole.shape[:-3]):
        return whole.reshape(1, *whole.shape[-3:])
    return whole.expand(*problem.query.shape[:-3], *whole.shape[-3:]).flatten(0, -4)


def _same_device(name: str, given: Tensor, problem: Problem) -> None:
    if given.device != problem.query.device:
        raise _wrong_device(query=problem.query, **{name: given})


def number(name: str, given: Any, hint: str) -> None:
    """Check that the argument is a plain number."""
    if not isinstance(given, (int, float, torch.SymInt, torch.SymFloat)):
        raise type_error(name, "is a number", got=type(given).__name__, hint=hint)
    if isinstance(given, int) and abs(given) > sys.float_info.max:
        raise value_error(name, "is a number that a float can hold", hint=hint)


def softcap(given: Any) -> float:
    """Check that the bound of the scores is positive and finite."""
    number("softcap", given, "pass a float, or None for no cap")
    if not 0 < given < math.inf:
        raise value_error("softcap", "is positive and finite", got=given, hint="None means no cap")
    return given


def dropout(given: Any) -> float:
    """Check that the argument is a probability."""
    number("dropout", given, "pass a probability; 0.0 drops nothing")
    if not 0 <= given <= 1:
        raise value_error(
            "dropout", "is a probability, 0 to 1", got=given, hint="0.0 drops nothing"
        )
    return given


def sinks(given: Any, problem: Problem) -> Tensor:
    """Check that there is one sink logit for each query head."""
    if not isinstance(given, Tensor) or not given.is_floating_point():
        got = str(given.dtype) if isinstance(given, Tensor) else type(given).__name__
        hint = "one logit for each query head, for example torch.zeros(head)"
        raise type_error("sinks", "is a floating-point tensor", got=got, hint=hint)
    _same_device("sinks", given, problem)
    heads = problem.query.shape[-3]
    if tuple(given.shape) != (heads,):
        raise value_error(
            "sinks",
            "has one logit for each query head, shape (head,)",
            shapes={"sinks": given, "query": problem.query},
            hint=f"expand it to shape ({heads},)",
        )
    return given
