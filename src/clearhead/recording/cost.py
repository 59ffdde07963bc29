"""What watching costs, estimated before it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from clearhead._capture import Call, FusedCall, Handler, call_with, read_call
from clearhead._core import Sizes
from clearhead.readings import Reading

__all__ = ["CallSizes", "Cost", "run_once", "seconds"]

_PROBE = 256


@dataclass(frozen=True)
class Cost:
    """What watching one call of the model takes, beside the model's own run.

    `bytes` are those of all values, which are kept; `seconds` are wall-clock time at the current
    number of threads, measured on a small map and scaled by the number of edges.
    """

    calls: int
    edges: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.calls} attention calls, {self.edges:,} edges: "
            f"{self.bytes / 1e6:,.1f} MB of values, about {self.seconds:.1f} s more"
        )


class CallSizes(Handler):
    """Records the layer and the sizes of each call, and computes nothing."""

    reads_values = False

    def __init__(self) -> None:
        self.calls: list[tuple[int, Sizes]] = []

    def after(self, call: Call, context: Tensor) -> None:
        """Keep the layer and the sizes of a call."""
        self.calls.append((call.layer, call.sizes))

    def failed(self, module: str, reason: str) -> None:
        """Raise: without this call the estimate would be too small."""
        raise RuntimeError(f"{module or 'the model'}: attention of unknown size: {reason}")


def run_once(
    model: Callable[..., Any], inputs: Any, watched: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Run the model on shapes alone where it can, else on the inputs themselves."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad():
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode, watched():
                call_with(model, pytree.tree_map_only(Tensor, mode.from_tensor, inputs))
        except Exception:
            # Some models read values on their way, which shapes alone do not have.
            with watched():
                call_with(model, inputs)


def seconds(read: Sequence[Reading], edges: int, heads: int) -> float:
    """Time the readings on a small map, and scale by the number of edges."""
    x = torch.randn(1, heads, _PROBE, 64, generator=torch.Generator().manual_seed(0))
    call = FusedCall(x, x, x)
    probe = [reading for reading in read if _general(reading)]
    read_call(call, probe, None)
    begun = time.perf_counter()
    read_call(call, probe, None)
    return (time.perf_counter() - begun) * edges / (heads * _PROBE * _PROBE)


def _general(reading: Reading) -> bool:
    """Whether a reading can be taken from a map of any size."""
    try:
        reading.check(Sizes(1, 1, _PROBE, _PROBE))
    except ValueError:
        return False
    return True
