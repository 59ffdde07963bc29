"""Compare the logits of two runs in the model's own dtype and in float64."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.dependence.library.runs.caches import cache_name
from clearhead.dependence.library.runs.contrasts import Contrast, Run
from clearhead.dependence.library.runs.modes import WEIGHTS, in_mode

__all__ = ["Compared", "compared", "other_outputs"]

# Rounding of sums of this many terms, for runs that differ in the shapes of their tensors only.
TERMS = 64


class Compared(NamedTuple):
    """How far two runs differ, and how far rounding can take them apart."""

    size: float  # largest difference of the logits in the model's own dtype; inf for a new NaN
    exact: float  # the same in float64; NaN where the model does not run in float64
    rounding: float  # what rounding explains in the own dtype
    exact_rounding: float  # and in float64
    logits: float  # the largest of all logits of the two runs

    @property
    def own(self) -> bool:
        """Whether the difference in the own dtype is more than rounding."""
        return self.size > self.rounding

    @property
    def real(self) -> bool:
        """Whether the difference in either dtype is more than rounding."""
        return self.own or self.exact > self.exact_rounding


class _Row(NamedTuple):
    logits: Tensor  # at the position
    largest: float


def compared(model: nn.Module, contrast: Contrast) -> Compared:
    """Run both runs in both dtypes.

    Rounding is bounded by the triangle inequality: were the two results equal without rounding,
    they would differ by no more than their own distances from their values in float64.
    """
    pair = contrast.one, contrast.two
    one, two = (_row(model, run) for run in pair)
    double = _in_float64(model)
    exact = None if double is None else _exact(double, pair)
    largest = max(one.largest, two.largest)
    unit = torch.finfo(one.logits.dtype).eps * largest
    size = _distance(one.logits, two.logits)
    if exact is None:
        return Compared(size, math.nan, TERMS * unit, math.inf, largest)
    off = sum(_distance(a.logits, b.logits) for a, b in zip((one, two), exact, strict=True))
    # Where float64 takes another branch (a top-k, a hash), the distance to it is no rounding.
    rounding = min(2 * off, 0.5 * size) if _branches(off, unit) else 2 * off
    return Compared(
        size,
        _distance(exact[0].logits, exact[1].logits),
        max(rounding, TERMS * unit),
        unit,
        largest,
    )


def _branches(off: float, unit: float) -> bool:
    return off > 1000 * TERMS * unit


def _exact(double: nn.Module, pair: tuple[Run, Run]) -> list[_Row] | None:
    try:
        rows = [_row(double, run) for run in pair]
    except Exception:  # code that needs its own dtype
        return None
    return rows if all(row.logits.isfinite().all() for row in rows) else None


def _in_float64(model: nn.Module) -> nn.Module | None:
    try:
        double: Any = copy.deepcopy(model).double()
    except Exception:  # a model that cannot be copied
        return None
    if hasattr(double, "set_experts_implementation"):
        double.set_experts_implementation("eager")  # the grouped one does not support float64
    return double


def _row(model: nn.Module, run: Run) -> _Row:
    """Run, from a fresh copy and one seed: some classes keep their state in the model."""
    twin = in_mode(model, run.mode)
    name, answer, more = cache_name(model), dict[str, Any](), dict[str, Any]()
    torch.manual_seed(0)
    with torch.set_grad_enabled(run.mode == "gradients"):
        for call in run.calls:
            call = call | ({"output_attentions": True} if run.mode == WEIGHTS else {})
            answer = twin(**_converted(call, twin), **more)
            more = {name: answer[name]} if len(run.calls) > 1 else {}
    logits = answer[run.output].detach().movedim(run.axis, 1)
    return _Row(logits[run.sample, run.position].flatten(), _largest(logits))


def other_outputs(model: nn.Module, inputs: dict[str, Any], length: int) -> list[tuple[str, int]]:
    """The outputs beside the logits that have an entry for each position, and its axis."""
    with torch.no_grad():
        answer = copy.deepcopy(model)(**inputs)
    found = []
    for name, value in answer.items():
        if torch.is_tensor(value) and value.is_floating_point() and name != "logits":
            axes = [axis for axis, size in enumerate(value.shape) if axis and size == length]
            found += [(name, axes[0])] if axes and value.ndim > 2 else []
    return found


def _converted(call: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    dtype = next(model.parameters()).dtype
    return {
        name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in call.items()
    }


def _largest(logits: Tensor) -> float:
    finite = logits[logits.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _distance(one: Tensor, two: Tensor) -> float:
    gap = (one.double() - two.double()).abs()
    same = (one == two) | (one.isnan() & two.isnan())
    return float(torch.where(same, 0.0, gap).nan_to_num(math.inf, math.inf).max())
