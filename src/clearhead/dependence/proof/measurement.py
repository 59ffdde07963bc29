"""Measure suspects against what rounding can do: leaks, rounding, and what stays unclear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from clearhead.dependence.proof.suspects import Suspect
from clearhead.dependence.subject import (
    MARGIN,
    Perturbation,
    Runner,
    largest,
    recorded_dtypes,
    rounding_floor,
    unit_of,
)

__all__ = ["Measurement", "measure"]

# Up to so many times the floor a suspect may be rounding of a large replacement.
NEAR = 1e6


class Measurement(NamedTuple):
    """Suspects, sorted by what rounding can do to the outputs of one runner."""

    runner: Runner
    floor: float = 0.0
    leaks: Sequence[Suspect] = ()
    rounding: Sequence[Suspect] = ()
    # Too large for rounding itself, and below what rounding causes where it flips a branch.
    unclear: Sequence[Suspect] = ()

    @property
    def resolution(self) -> float:
        """The largest effect, relative to the largest output, that passes as rounding."""
        scale = largest(self.runner.base())
        return self.floor / scale if scale else 0.0


def measure(runner: Runner, suspects: Sequence[Suspect]) -> Measurement:
    """Sort the suspects."""
    if not suspects:
        return Measurement(runner)
    ruler = _Ruler(runner)
    suspects = [ruler.measured(suspect) for suspect in suspects]
    # An error of half of the digits is no rounding.
    plain = math.sqrt(ruler.unit) * largest(runner.base())
    below = [suspect for suspect in suspects if 0 < suspect.size <= suspect.floor]
    return Measurement(
        runner,
        ruler.floor,
        leaks=[suspect for suspect in suspects if suspect.size > suspect.floor],
        rounding=[suspect for suspect in below if suspect.size <= plain],
        unclear=[suspect for suspect in below if suspect.size > plain],
    )


class _Ruler:
    """The floor of rounding for the inputs, and for perturbations with large numbers."""

    def __init__(self, runner: Runner):
        self._runner = runner
        with recorded_dtypes() as seen:
            runner.outputs()
        self.unit = unit_of(seen | runner.dtypes())
        self.floor = rounding_floor(runner, self.unit)
        self._bounds: dict[tuple[int, int], float] = {}

    def measured(self, suspect: Suspect) -> Suspect:
        """Return the suspect with its floor, under the replacement that shows it best."""
        if not self.floor < suspect.size <= NEAR * self.floor:
            return replace(suspect, floor=self.floor)
        own = replace(suspect, floor=self._bound(suspect.perturbation))
        if own.size > own.floor:
            return own
        others = [
            Perturbation(own.perturbation.sources, number)
            for number in range(len(self._runner.replacements))
            if number != own.perturbation.replacement
        ]
        again = [self._remeasured(own, other) for other in others]
        return next((other for other in again if other.size > other.floor), own)

    def _remeasured(self, suspect: Suspect, perturbation: Perturbation) -> Suspect:
        (moved,) = self._runner.movements([perturbation])
        size = 0.0 if moved is None else suspect.size_in(moved)
        floor = self._bound(perturbation) if size else self.floor
        return replace(suspect, perturbation=perturbation, size=size, floor=floor)

    def _bound(self, perturbation: Perturbation) -> float:
        """What rounding can do where the perturbed run has numbers of this size."""
        key = id(perturbation.sources), perturbation.replacement
        if key not in self._bounds:
            outputs = self._runner.outputs(self._runner.perturbed(perturbation))
            self._bounds[key] = max(self.floor, MARGIN * self.unit * largest(outputs))
        return self._bounds[key]
