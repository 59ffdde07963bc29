"""Check that the positions are on the axis that they were taken to be on."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead._core import value_error
from clearhead.dependence.report import Outcome
from clearhead.dependence.subject import (
    ModelInputs,
    Perturbation,
    Replacement,
    Runner,
    rounding_floor,
    undefined,
)

__all__ = ["check_axes"]


def check_axes(runner: Runner, *, given: bool) -> Outcome:
    """Raise a ValueError where the samples depend on each other as positions do, and positions not.

    `given` says that the caller named the axis; then it is reported as trouble instead.
    """
    if runner.inputs.main.batch_axis is None or runner.noisy or _mixes(runner, along=1):
        return Outcome()
    if not _samples_mix(runner):
        return _independent(runner)
    read = runner.inputs
    problem = (
        f"no output depends on another position of axis {read.main.axis}, "
        f"but outputs depend on other entries of axis {read.main.batch_axis}"
    )
    if given:
        return Outcome(trouble=(f"{problem}: are the positions there?",))
    raise value_error(
        "inputs",
        problem,
        shapes={"inputs": read[read.main.key]},
        hint=f"pass axis={read.main.batch_axis} if the positions are on that axis (a layer with "
        "batch_first=False reads (position, batch, width)), or build the model with "
        "batch_first=True; audit.batch tests whether samples see each other",
    )


def _independent(runner: Runner) -> Outcome:
    if runner.inputs.positions == 1 or undefined(runner.base()).any():
        return Outcome()
    axis = runner.inputs.main.axis
    return Outcome(
        notes=(
            f"no output depends on another position: a model that works position by position, "
            f"or are the positions on another axis than {axis} (axis=)?",
        )
    )


def _samples_mix(runner: Runner) -> bool:
    if runner.inputs.batch > 1:
        return _mixes(runner, along=0)
    # One sample says nothing of others: put a copy beside it.
    doubled = [_doubled(runner.inputs, one) for one in runner.replacements]
    pair = Runner(runner.model, runner.inputs.repeat(2), doubled)
    try:
        return _mixes(pair, along=0)
    except Exception:  # the model may accept one batch size only
        return False


def _doubled(inputs: ModelInputs, replacement: Replacement) -> Replacement:
    axes = {one.key: one.batch_axis for one in inputs.content}
    return {
        key: value if (axis := axes[key]) is None else torch.cat([value] * 2, axis)
        for key, value in replacement.items()
    }


def _mixes(runner: Runner, along: int) -> bool:
    """Whether every second entry of an axis (0 sample, 1 position) reaches the others."""
    sources = torch.zeros(runner.inputs.batch, runner.inputs.positions, dtype=torch.bool)
    if sources.shape[along] < 2:
        return False
    even = torch.arange(sources.shape[along]) % 2 == 0
    even = (even if along else even[:, None]).expand_as(sources)
    return any(_reaches(runner, half) for half in (even, ~even))


def _reaches(runner: Runner, sources: Tensor) -> bool:
    moved = [m for m in runner.movements([Perturbation(sources, 0)]) if m is not None]
    sizes = [float(m.expand_as(sources)[~sources].max()) for m in moved]
    return max(sizes, default=0.0) > 0 and max(sizes) > rounding_floor(runner)
