"""Distinguish leaks from rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.dependence.proof.measurement import Measurement, measure
from clearhead.dependence.proof.narrowing import (
    INVERTED,
    NEXT,
    narrowed,
    remeasured,
    representatives,
)
from clearhead.dependence.proof.suspects import Suspect
from clearhead.dependence.report import Outcome
from clearhead.dependence.subject import (
    MARGIN,
    Perturbation,
    Runner,
    float64_copy,
    largest,
    unit_of,
)

__all__ = ["decide"]

BOTH_SIDES = (
    "every output depends on the last input: is the model meant to read both sides, as a "
    "BERT does? then allowed=masks.everything() (--allowed everything)"
)


def decide(
    runner: Runner, suspects: Sequence[Suspect], forbidden: Tensor, *, float64: bool = True
) -> Outcome:
    """Keep the suspects that are no rounding, and find which pair and which module each is."""
    unit = unit_of(runner.dtypes())
    if not suspects:
        return Outcome(resolution=unit)
    double = _double(runner) if float64 else None
    found = (
        _decide_in_own_dtype(runner, suspects, forbidden)
        if double is None
        else _decide_in_float64(runner, double, suspects, forbidden)
    )
    return found._replace(resolution=max(unit, found.resolution))


def _decide_in_own_dtype(runner: Runner, suspects: Sequence[Suspect], forbidden: Tensor) -> Outcome:
    own = measure(runner, suspects)
    notes: tuple[str, ...] = ()
    if own.rounding:
        notes = (
            f"{len(own.rounding)} outputs moved by less than rounding can ({own.floor:.2g}): "
            "undecided; pass the module itself, so that it can be measured in float64",
        )
    found = _joined(_found(own, forbidden), _unclear(own))
    return found._replace(notes=notes + found.notes, resolution=own.resolution)


def _decide_in_float64(
    runner: Runner, double: Runner, suspects: Sequence[Suspect], forbidden: Tensor
) -> Outcome:
    exact = measure(double, remeasured(double, suspects))
    # In float64 the model may take another branch (a bucket, a top-k, a comparison), so that what
    # leaks in its own dtype does not move there at all.
    explained = {leak.place for leak in exact.leaks}
    own = measure(runner, _beyond_one_rounding(runner, suspects, explained))
    found = _joined(_found(exact, forbidden), _found(own, forbidden), _unclear(own))
    return found._replace(
        notes=_rounding(exact, own) + _notes_on_sizes(exact, own) + found.notes,
        forwards=double.forwards,
        resolution=exact.resolution,
    )


def _beyond_one_rounding(
    runner: Runner, suspects: Sequence[Suspect], explained: set[tuple[int, int]]
) -> list[Suspect]:
    rounding = MARGIN * unit_of(runner.dtypes()) * largest(runner.base())
    return [s for s in suspects if s.place not in explained and s.size > rounding]


def _double(runner: Runner) -> Runner | None:
    """Make the same runner on a float64 copy of the model, or None where there is none."""
    copied = float64_copy(runner.model, runner.inputs)
    if copied is None:
        return None
    double = copied.runner(runner.inputs, runner.replacements)
    double.single, double.noisy = runner.single, runner.noisy
    double.copies = runner.copies if double.enable_copies(runner.copies) else 1
    return double


def _rounding(exact: Measurement, own: Measurement) -> tuple[str, ...]:
    leaks = {leak.place for leak in own.leaks}
    small = [suspect.size for suspect in exact.rounding if suspect.place not in leaks]
    if not small:
        return ()
    return (
        f"{len(small)} outputs moved by rounding only (in float64 by at most {max(small):.1g}, "
        f"floor {exact.floor:.1g})",
    )


def _notes_on_sizes(exact: Measurement, own: Measurement) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    if exact.leaks:
        notes += ("sizes were measured on a float64 copy of the model",)
    if own.leaks:
        notes += (
            f"{len(own.leaks)} outputs move in the model's own dtype, and not in a float64 copy, "
            "which takes another branch (a bucket, a top-k, a comparison); the sizes of these were "
            "measured in the own dtype",
        )
    return notes


def _unclear(own: Measurement) -> Outcome:
    """Report the suspects that are too large for rounding, but not larger than what it causes."""
    if not own.unclear:
        return Outcome()
    most = max(own.unclear, key=lambda suspect: suspect.size)
    trouble = (
        f"{len(own.unclear)} outputs moved by up to {most.size:.3g} (sample {most.sample}, output "
        f"{most.query}), and rounding alone moves outputs by {own.floor / MARGIN:.2g}, as if it "
        "flipped a branch: undecided"
    )
    return Outcome(untested=len(own.unclear), trouble=(trouble,))


def _joined(*outcomes: Outcome) -> Outcome:
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    notes = dict.fromkeys(note for outcome in outcomes for note in outcome.notes)
    return Outcome(
        tuple(sorted(findings, key=lambda finding: (finding.sample, finding.query))),
        moved=sum(outcome.moved for outcome in outcomes),
        untested=sum(outcome.untested for outcome in outcomes),
        trouble=tuple(text for outcome in outcomes for text in outcome.trouble),
        notes=tuple(notes),
    )


def _found(measured: Measurement, forbidden: Tensor) -> Outcome:
    """Narrow the leaks down."""
    leaks = measured.leaks
    if not leaks:
        return Outcome()
    findings = [narrowed(measured.runner, leak, forbidden) for leak in representatives(leaks)]
    notes: tuple[str, ...] = ()
    inverted = any(finding.hint == INVERTED for finding in findings)
    if not inverted and _reads_both_sides(measured.runner, forbidden, measured.floor):
        findings = [replace(f, hint="" if f.hint == NEXT else f.hint) for f in findings]
        notes = (BOTH_SIDES,)
    return Outcome(tuple(findings), moved=len({leak.place for leak in leaks}), notes=notes)


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
