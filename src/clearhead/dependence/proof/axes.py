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
    largest,
    rounding_floor,
    undefined,
)

__all__ = ["check_axes"]

# Movement above this share of the largest output is no rounding in any dtype, and needs no floor.
PLAIN = 0.1


def check_axes(runner: Runner, *, given: bool) -> Outcome:
    """Raise a ValueError where the samples depend on each other as positions do, and positions not.

    `given` says that the caller named the axis; then it is reported as trouble instead.
    """
    if runner.noisy or _mixes(runner, along=1):
        return Outcome()
    if runner.inputs.main.batch_axis is not None and _samples_mix(runner):
        return _swapped(runner, given)
    # Runs that failed, and outputs that are NaN, show nothing.
    if runner.inputs.positions == 1 or runner.failures or undefined(runner.base()).any():
        return Outcome()
    axis = runner.inputs.main.axis
    return Outcome(
        notes=(
            "no output was seen to depend on another position: a model that works position by "
            f"position, or are the positions on another axis than {axis} (axis=)?",
        )
    )


def _swapped(runner: Runner, given: bool) -> Outcome:
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


def _samples_mix(runner: Runner) -> bool:
    if runner.inputs.batch > 1:
        return _mixes(runner, along=0)
    # One sample shows nothing about others: put a copy beside it.
    doubled = [_doubled(runner.inputs, one) for one in runner.replacements]
    try:
        return _mixes(Runner(runner.model, runner.inputs.repeat(2), doubled), along=0)
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
    return any(
        _reaches(runner, Perturbation(half, number))
        for number in range(len(runner.replacements))
        for half in (even, ~even)
    )


def _reaches(runner: Runner, perturbation: Perturbation) -> bool:
    (moved,) = runner.movements([perturbation])
    if moved is None:
        return False
    size = float(_elsewhere(moved, perturbation.sources).max())
    return size > PLAIN * largest(runner.base()) or (size > 0 and size > rounding_floor(runner))


def _elsewhere(moved: Tensor, sources: Tensor) -> Tensor:
    return moved.expand_as(sources)[~sources]
