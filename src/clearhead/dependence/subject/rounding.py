"""The float dtypes that a model computes in, and how far rounding alone can move its outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.dependence.subject.outputs import largest, movement
from clearhead.dependence.subject.runner import Runner

__all__ = ["LOWER", "MARGIN", "comparison_floor", "recorded_dtypes", "rounding_floor", "unit_of"]

LOWER = {torch.float32, torch.float16, torch.bfloat16}
# Several roundings a module, and only two draws of them.
MARGIN = 8


def unit_of(dtypes: Collection[torch.dtype]) -> float:
    """The unit in the last place of the coarsest dtype, relative to 1."""
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def rounding_floor(runner: Runner, unit: float = 0.0) -> float:
    """Measure what rounding can do: jitter every module's output by one unit in the last place.

    `unit` is that of the coarsest dtype that the runs compute in (float32 for softmax and norms, as
    a rule): in runs of other shapes or of other code any number in them may be rounded anew.
    """
    unit = max(unit, unit_of(runner.dtypes()))
    # Where the model is noisy one repeat may happen to be close to the first run.
    sizes = [_repeat_size(runner) for _ in range(8 if runner.noisy else 1)]
    if isinstance(runner.model, nn.Module):
        for seed in range(2):
            with _jittered(runner.model, seed, unit):
                sizes.append(_jitter_size(runner))
    return MARGIN * max(*sizes, unit * largest(runner.base()))


def comparison_floor(runner: Runner, seen: Collection[torch.dtype]) -> float:
    """Measure what rounding can do between runs of other shapes or of other code.

    `seen` are the dtypes that all runs compute in.
    """
    return rounding_floor(runner, max(unit_of(seen), runner.table_eps))


def _repeat_size(runner: Runner) -> float:
    return float(movement(runner.base(), runner.outputs()).max())


def _jitter_size(runner: Runner) -> float:
    """How far the finite outputs move: where NaN comes or goes, another path was taken."""
    moved = movement(runner.base(), runner.outputs())
    return float(moved[torch.isfinite(moved)].amax()) if torch.isfinite(moved).any() else 0.0


@contextmanager
def recorded_dtypes() -> Iterator[set[torch.dtype]]:
    """Record the float dtypes of everything that is computed inside the block."""
    recorder = _DtypeRecorder()
    with recorder:
        yield recorder.dtypes


class _DtypeRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        # Tables made without inputs (rotary phases) are equal in both runs only at equal positions.
        if isinstance(value, Tensor) and value.is_floating_point():
            self.dtypes.add(value.dtype)
        return value


@contextmanager
def _jittered(model: nn.Module, seed: int, unit: float) -> Iterator[None]:
    generator = torch.Generator().manual_seed(seed)

    def jitter(_module: nn.Module, _args: Any, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        if value.is_nested:  # torch's encoder, between its layers
            return torch.nested.as_nested_tensor([noisy(part) for part in value.unbind()])
        return noisy(value)

    def noisy(value: Tensor) -> Tensor:
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float32) * 2 - 1
        return value * (1 + max(unit, torch.finfo(value.dtype).eps) * noise.to(value))

    leaves = [module for module in model.modules() if not any(module.children())]
    handles = [module.register_forward_hook(jitter) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
