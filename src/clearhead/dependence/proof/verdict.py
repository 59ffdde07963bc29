"""Tell leaks from rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.dependence.proof.narrowing import (
    INVERTED,
    NEXT,
    narrowed,
    remeasured,
    representatives,
)
from clearhead.dependence.proof.suspects import Suspect
from clearhead.dependence.report import Outcome
from clearhead.dependence.subject import Perturbation, Runner, float64_runner, rounding_floor

__all__ = ["decide"]

BOTH_SIDES = (
    "every output depends on the last input: is the model meant to read both sides, as a "
    "BERT does? then allowed=masks.everything() (--allowed everything)"
)


def decide(
    runner: Runner, suspects: Sequence[Suspect], forbidden: Tensor, *, float64: bool = True
) -> Outcome:
    """Keep the suspects that are no rounding, and find which pair and which module each is."""
    if not suspects:
        return Outcome()
    double = float64_runner(runner) if float64 else None
    if double is not None:
        double.copies = runner.copies if double.enable_copies(runner.copies) else 1
        suspects = remeasured(double, suspects)
    judging = double or runner
    floor = rounding_floor(judging)
    leaks = [suspect for suspect in suspects if suspect.size > floor]
    small = [suspect.size for suspect in suspects if 0 < suspect.size <= floor]
    found = _leaks(judging, leaks, forbidden, floor)
    notes = _rounding(small, floor, double is not None) + found.notes
    if double is not None and leaks:
        notes += ("sizes were measured on a float64 copy of the model",)
    return found._replace(notes=notes, forwards=0.0 if double is None else double.forwards)


def _rounding(small: list[float], floor: float, in_float64: bool) -> tuple[str, ...]:
    if not small:
        return ()
    if in_float64:
        return (
            f"{len(small)} outputs moved by rounding only (in float64 by at most {max(small):.1g}, "
            f"floor {floor:.1g})",
        )
    return (
        f"{len(small)} outputs moved by less than rounding can ({floor:.2g}): undecided; "
        "pass the module itself, so that it can be measured in float64",
    )


def _leaks(runner: Runner, leaks: Sequence[Suspect], forbidden: Tensor, floor: float) -> Outcome:
    findings = [narrowed(runner, leak, forbidden, floor) for leak in representatives(leaks)]
    notes: tuple[str, ...] = ()
    inverted = any(finding.hint == INVERTED for finding in findings)
    if leaks and not inverted and _reads_both_sides(runner, forbidden, floor):
        findings = [replace(f, hint="" if f.hint == NEXT else f.hint) for f in findings]
        notes = (BOTH_SIDES,)
    moved = len({(leak.sample, leak.query) for leak in leaks})
    return Outcome(tuple(findings), moved=moved, notes=notes)


def _reads_both_sides(runner: Runner, forbidden: Tensor, floor: float) -> bool:
    """Whether all earlier outputs depend on the last input, where only the future is forbidden."""
    size = forbidden.shape[-1]
    future = torch.ones(size, size, dtype=torch.bool).triu(1)
    if size < 3 or not torch.equal(forbidden.cpu(), future.expand_as(forbidden)):
        return False
    last = torch.zeros(runner.inputs.batch, size, dtype=torch.bool)
    last[:, -1] = True
    perturbations = [Perturbation(last, number) for number in range(len(runner.replacements))]
    moves = [moved for moved in runner.movements(perturbations) if moved is not None]
    return bool(moves) and bool((torch.stack(moves).amax(0)[:, :-1] > floor).all())
