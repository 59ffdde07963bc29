"""Rounding: the audited model in float64, and how far rounding alone can move its outputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.dependence.subject.inputs import ModelInputs, call
from clearhead.dependence.subject.outputs import movement, outputs_of
from clearhead.dependence.subject.runner import Runner
from clearhead.dependence.subject.state import untouched

__all__ = ["float64_runner", "most_exact", "rounding_floor"]

# Several roundings a module, and only two draws of them.
_MARGIN = 8


def most_exact(model: Any, inputs: ModelInputs, *, float64: bool) -> tuple[Any, torch.dtype | None]:
    """Return a float64 copy and its dtype, where rounding hardly shows; else the model and None."""
    double = _float64_copy(model, inputs) if float64 else None
    return (model, None) if double is None else (double, torch.float64)


def float64_runner(runner: Runner) -> Runner | None:
    """Make the same runner on a float64 copy of the model, or None where there is none."""
    double = _float64_copy(runner.model, runner.inputs)
    if double is None:
        return None
    replacements = [
        {key: value.double() if value.is_floating_point() else value for key, value in one.items()}
        for one in runner.replacements
    ]
    twin = Runner(double, runner.inputs.to(torch.float64), replacements)
    twin.single, twin.noisy = runner.single, runner.noisy
    return twin


def _float64_copy(model: Any, inputs: ModelInputs) -> nn.Module | None:
    """Copy the model to float64, if it then answers in float64."""
    if not isinstance(model, nn.Module):
        return None
    try:
        double: Any = copy.deepcopy(model).double()
        if hasattr(double, "set_experts_implementation"):
            double.set_experts_implementation("eager")  # the grouped one does not support float64
        with untouched(model), untouched(double):
            native = outputs_of(call(model, inputs), inputs)
            outputs = outputs_of(call(double, inputs.to(torch.float64)), inputs)
    except Exception:  # a model that fails in another dtype simply has no float64 copy
        return None
    pairs = list(zip(native, outputs, strict=True))
    # Some models overflow in float64 only: a mask of finfo.min that is added to something.
    sane = all(torch.equal(one.rows.isfinite(), two.rows.isfinite()) for one, two in pairs)
    return double if sane and any(o.rows.dtype == torch.float64 for o in outputs) else None


def rounding_floor(runner: Runner, *, other_shapes: bool = False) -> float:
    """Measure what rounding can do: jitter every module's output by one unit in the last place.

    In runs of other shapes any number in the model may be rounded anew, so the unit is that of
    the coarsest dtype that the model computes in (float32 for softmax and norms, as a rule).
    """
    dtypes = runner.dtypes()
    if other_shapes:
        with _DtypeRecorder() as recorder:
            runner.outputs()
        dtypes = dtypes | recorder.dtypes
    unit = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    # Where the model is noisy one repeat may happen to be close to the first run.
    sizes = [_repeat_size(runner) for _ in range(8 if runner.noisy else 1)]
    if isinstance(runner.model, nn.Module):
        for seed in range(2):
            with _jittered(runner.model, seed, unit):
                sizes.append(_repeat_size(runner))
    return _MARGIN * max(*sizes, unit * runner.scale())


def _repeat_size(runner: Runner) -> float:
    return float(movement(runner.base(), runner.outputs()).max())


class _DtypeRecorder(TorchDispatchMode):
    """Records the float dtypes that a run computes in."""

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
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float32) * 2 - 1
        return value * (1 + max(unit, torch.finfo(value.dtype).eps) * noise.to(value))

    leaves = [module for module in model.modules() if not any(module.children())]
    handles = [module.register_forward_hook(jitter) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
