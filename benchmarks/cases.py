"""Attention calls, row by row: the work, the peers, and the goal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
import machine
import peers
from clearhead import masks, readings
from measure import Goal, Row, Settings, differences

FIVE = (
    readings.LogSumExp(), readings.TopK(8), readings.Entropy(), readings.Received(),
    readings.BlockMap(32),
)  # fmt: skip
Shape = tuple[int, ...]
PLAIN_GOALS = {
    (torch.float32, False): 2.3,
    (torch.float32, True): 2.6,
    (torch.bfloat16, False): 4.0,
    (torch.bfloat16, True): 4.5,
}
BOTH = (None, masks.causal())


def tensors(shape: Shape, dtype: torch.dtype, source: int | None = None) -> list[Tensor]:
    """Query, key and value; fewer queries than sources where `source` is given."""
    batch, head, query, width = shape
    sizes = (query, source or query, source or query)
    return [torch.randn(batch, head, size, width).to(dtype) for size in sizes]


def flops(shape: Shape, mask: masks.Mask | None, products: int = 2) -> float:
    """Operations, two per multiply-add. A causal mask counts as half, by convention."""
    batch, head, size, width = shape
    return 2.0 * products * batch * head * size * size * width / (1 if mask is None else 2)


def share(mask: masks.Mask | None, size: int) -> float:
    """The share of edges in a mask, over all samples and heads."""
    return 1.0 if mask is None else mask.counts(size, size).double().mean().item() / size


def kind(mask: masks.Mask | None) -> str:
    return "full" if mask is None else "causal"


def error(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> float:
    """Our largest error against float64, relative to SDPA's in the same dtype, on one head."""
    q, k, v = (x[:1, :1] for x in (q, k, v))
    causal = mask is not None
    right = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return float((ch.attend(q, k, v, mask) - right).abs().max() / (theirs - right).abs().max())


def attend(
    shapes: Sequence[Shape],
    dtypes: Sequence[torch.dtype],
    others: Sequence[str] = (),
    label: str = "",
) -> Iterator[Row]:
    """Context alone, full and causal, beside SDPA and the named peers."""
    for dtype in dtypes:
        for shape in shapes:
            q, k, v = tensors(shape, dtype)
            for mask in BOTH:
                known = [n for n in others if mask is not None or n != "SDPA, bool tensor"]
                ways, note = peers.ways(["SDPA", *known], q, k, v, mask)
                goals = [Goal("SDPA", PLAIN_GOALS[dtype, mask is not None])]
                if shape[2] >= 8192 and dtype == torch.float32:
                    goals.append(Goal("peak", 0.85))
                yield Row(
                    f"{label}{kind(mask)} {shape}",
                    {"ours": partial(ch.attend, q, k, v, mask), **ways},
                    dtype, flops(shape, mask), 2 * shape[3], goals=tuple(goals), note=note,
                    error=partial(error, q, k, v, mask) if shape[2] <= 4096 else None,
                )  # fmt: skip


def isa(shapes: Sequence[Shape], name: str) -> Iterator[Row]:
    """The same with another instruction set, in float32; "peak" is then that of the set."""
    kernel = machine.kernel()
    if kernel is None or name not in kernel.available():
        return
    before = kernel.isa()
    kernel.choose(name)
    try:
        for row in attend(shapes, [torch.float32], label=f"{name}, "):
            row.goals = (Goal("SDPA", 1.35 if "causal" in row.name else 1.2),)
            yield row
    finally:
        kernel.choose(before)


def read(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> Iterator[Row]:
    """Five readings in the same pass, beside SDPA and ours without readings."""
    for dtype in dtypes:
        over = 1.2 if dtype == torch.float32 else 1.35
        for shape in shapes:
            q, k, v = tensors(shape, dtype)
            for mask in BOTH:
                ways, note = peers.ways(["SDPA"], q, k, v, mask)
                goals = [Goal("ours, no readings", 1 / over)]
                if dtype == torch.float32:
                    goals.insert(0, Goal("SDPA", 2))
                yield Row(
                    f"five readings, {kind(mask)} {shape}",
                    {
                        "ours": partial(ch.attend, q, k, v, mask, read=FIVE),
                        "ours, no readings": partial(ch.attend, q, k, v, mask),
                        **ways,
                    },
                    dtype, flops(shape, mask), 2 * shape[3], goals=tuple(goals), note=note,
                )  # fmt: skip


def weights(shape: Shape) -> Iterator[Row]:
    """Readings of the weights, beside eager attention that returns them all."""
    q, k, v = tensors(shape, torch.float32)
    ways, _ = peers.ways(["eager with weights"], q, k, v)
    for name, reading, count in (
        ("all weights", readings.Weights(), 2),
        ("top 8, entropy and received", FIVE[1:4], 1),
    ):
        ours = partial(ch.attend, q, k, v, read=reading)
        yield Row(
            f"{name} {shape}", {"ours": ours, **ways}, flops=flops(shape, None),
            each=2 * shape[3], compare=count, peer="eager with weights",
        )  # fmt: skip


def masked(shape: Shape, width: int = 256, document: int = 600, flex: bool = True) -> Iterator[Row]:
    """Masks with mostly empty tiles, beside a bool tensor and compiled FlexAttention."""
    q, k, v = tensors(shape, torch.float32)
    ids = torch.arange(shape[2]) // document
    window = masks.window(width)
    for name, mask in (
        (f"window({width})", window),
        (f"documents of {document}, causal", masks.document(ids) & masks.causal()),
        (f"window({width}) and 4 sinks", masks.causal() & (window | masks.first(4))),
    ):
        ways, note = peers.ways(["SDPA", "flex"] if flex else ["SDPA"], q, k, v, mask)
        yield Row(
            f"{name} {shape}",
            {
                "ours": partial(ch.attend, q, k, v, mask),
                "ours, bool tensor": partial(ch.attend, q, k, v, mask.dense(shape[2])),
                **ways,
            },
            flops=flops(shape, None) * share(mask, shape[2]), each=2 * shape[3], note=note,
            goals=(Goal("SDPA", 25), Goal("flex", 2)),
        )  # fmt: skip


def backward(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> Iterator[Row]:
    """`autograd.grad` alone, after a forward that is not timed."""
    for dtype in dtypes:
        least = 2.3 if dtype == torch.float32 else 2.0
        for shape in shapes:
            q, k, v = leaves = [x.requires_grad_() for x in tensors(shape, dtype)]
            grad = torch.randn(shape).to(dtype)
            for mask in BOTH:
                found, note = peers.ways(["SDPA"], q, k, v, mask)
                found["ours"] = partial(ch.attend, *leaves, mask)
                ways = {
                    who: partial(torch.autograd.grad, way(), leaves, grad, retain_graph=True)
                    for who, way in found.items()
                }
                yield Row(
                    f"backward, {kind(mask)} {shape}", ways, dtype, flops(shape, mask, 5),
                    5 * shape[3], goals=(Goal("SDPA", least),), compare=3, note=note,
                )  # fmt: skip


def dropout(shape: Shape, p: float = 0.1) -> Iterator[Row]:
    """Forward and backward of a causal call with dropout: each call drops other weights."""
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [x.requires_grad_() for x in tensors(shape, dtype)]
        grad, mask = torch.randn(shape).to(dtype), masks.causal()
        calls = {
            "ours": partial(ch.attend, mask=mask, dropout=p),
            "SDPA": partial(F.scaled_dot_product_attention, is_causal=True, dropout_p=p),
        }
        yield Row(
            f"forward and backward, causal, dropout {p} {shape}",
            {who: partial(_both_ways, call, leaves, grad) for who, call in calls.items()},
            dtype, flops(shape, mask, 7), 7 * shape[3] // 2, compare=0,
        )  # fmt: skip


def _both_ways(call: Any, leaves: list[Tensor], grad: Tensor) -> Any:
    return torch.autograd.grad(call(*leaves), leaves, grad)


def decode(sizes: Sequence[int], dtypes: Sequence[torch.dtype], head: int = 12) -> Iterator[Row]:
    """One query over a long cache: the cost is reading the cache, as for `torch.sum`."""
    for dtype in dtypes:
        for size in sizes:
            q, k, v = tensors((1, head, 1, 64), dtype, source=size)
            ways, note = peers.ways(["SDPA"], q, k, v)
            goals = [Goal("SDPA", 1.5)] + [Goal("sum of K and V", 0.85)] * (size >= 32768)
            yield Row(
                f"decode, {head} heads, cache of {size}",
                {"ours": partial(ch.attend, q, k, v), **ways},
                dtype,
                yardsticks={"sum of K and V": partial(_sums, k, v)},
                floor="sum of K and V", goals=tuple(goals), note=note,
            )  # fmt: skip


def _sums(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k.sum(), v.sum()


def small() -> Iterator[Row]:
    """Small calls, dominated by the overhead of the call."""
    for shape, goal in (
        ((32, 8, 64, 32), Goal("SDPA", 2)),
        ((1, 4, 64, 64), Goal("SDPA", 1.3)),
        ((1, 1, 4, 3), Goal(most=12e-6)),
    ):
        q, k, v = tensors(shape, torch.float32)
        ways, note = peers.ways(["SDPA"], q, k, v)
        yield Row(
            f"small {shape}", {"ours": partial(ch.attend, q, k, v), **ways},
            # Four positions are almost no work: the time is the overhead of the call.
            flops=flops(shape, None) if shape[2] > 4 else 0, each=2 * shape[3],
            goals=(goal,), note=note,
        )  # fmt: skip


def tiled(shape: Shape) -> Iterator[Row]:
    """The fallback without a kernel, without readings and with five."""
    q, k, v = tensors(shape, torch.float32)
    for mask in BOTH:
        ways, note = peers.ways(["SDPA"], q, k, v, mask)
        for label, reading, most in (("", None, 1.15), (", five readings", FIVE, 2.1)):
            # The goal holds for many sources only.
            goals = (Goal("SDPA", 1 / most),) if shape[2] >= 4096 else ()
            yield Row(
                f"tiled, {kind(mask)}{label} {shape}",
                {"ours": partial(ch.attend, q, k, v, mask, read=reading, impl="tiled"), **ways},
                flops=flops(shape, mask), each=2 * shape[3], goals=goals, note=note,
            )  # fmt: skip


def own(settings: Settings) -> Iterator[Row]:
    """A case from the command line, beside every peer that supports it."""
    assert settings.shape is not None
    dtype = getattr(torch, settings.dtype)
    q, k, v = tensors(settings.shape, dtype)
    mask = masks.parse(settings.mask) if settings.mask else None
    reading = parse_readings(settings.read) if settings.read else None
    names = ["SDPA", "eager", "flex", "onnxruntime"]
    if peers.is_causal(mask):
        names.insert(1, "SDPA, bool tensor")
    ways, note = peers.ways(names, q, k, v, mask)
    if reading is not None:
        ways["ours, no readings"] = partial(ch.attend, q, k, v, mask, impl=settings.impl)
    ours = partial(ch.attend, q, k, v, mask, read=reading, impl=settings.impl)
    label = ", ".join(x for x in (settings.mask or "full", settings.read, settings.impl) if x)
    work = flops(settings.shape, None) * share(mask, settings.shape[2])
    each = 2 * settings.shape[3]
    row = Row(f"{label} {settings.shape}", {"ours": ours, **ways}, dtype, work, each, note=note)
    for name, how in differences(row).items():
        # Empty rows, for example, are NaN elsewhere.
        del row.ways[name]
        row.note = "; ".join(x for x in (row.note, f"{name} {how}") if x)
    yield row


def parse_readings(text: str) -> Any:
    """The readings of an expression such as "Entropy(), TopK(8)"; names alone are enough."""
    known = {name: getattr(readings, name) for name in readings.__all__} | {"masks": masks}
    try:
        found = eval(f"({text},)", {"__builtins__": {}}, known)
        return tuple(x() if isinstance(x, type) else x for x in found)
    except (SyntaxError, NameError, TypeError, AttributeError) as reason:
        raise ValueError(f"--read {text!r}: {reason}; for example: Entropy(), TopK(8)") from None
