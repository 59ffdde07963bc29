"""Compare two runs that must give the same rows: in a batch or alone, cached or in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clearhead.dependence.proof.localization import ModuleCall, first_difference
from clearhead.dependence.report import Finding, Outcome
from clearhead.dependence.subject import Runner, largest, name_of

__all__ = ["Comparison", "RowGap", "compare"]

# The module calls of both runs, for the row at which they differ.
TracePair = tuple[list[ModuleCall], list[ModuleCall]]


@dataclass(frozen=True)
class RowGap:
    """How far two runs differ in one row, and how to report it."""

    source: int
    query: int
    size: float
    kind: str
    sample: int = 0
    hint: str = ""
    undefined: bool = False  # both runs have the same NaN or inf there

    @property
    def place(self) -> tuple[str, int, int]:
        """What was compared, and at which output."""
        return self.kind, self.sample, self.query


class Comparison(NamedTuple):
    """The gaps between a runner and other runs, beside the floor of rounding."""

    runner: Runner
    gaps: Sequence[RowGap]
    floor: float
    trace: Callable[[RowGap], TracePair]

    @property
    def large(self) -> list[RowGap]:
        """The gaps that are no rounding."""
        return [gap for gap in self.gaps if gap.size > self.floor]


def compare(exact: Comparison, own: Comparison | None = None) -> list[Outcome]:
    """Turn gaps larger than rounding into findings, at most two of each kind.

    `own` compares in the model's own dtype what `exact` compares in float64: a gap that is only
    there may be a branch that rounding flips, or a fault of that dtype, so it is left undecided.
    """
    found = _found(exact)
    if own is None:
        return [found]
    known = {gap.place for gap in exact.large}
    rest = [gap for gap in own.large if gap.place not in known]
    return [found, _undecided(rest, own.floor)]


def _found(compared: Comparison) -> Outcome:
    runner, floor, large = compared.runner, compared.floor, compared.large
    findings = [
        Finding(
            gap.source, gap.query, gap.size, floor,
            first_difference(*compared.trace(gap)) or f"{name_of(runner.model)} (its own forward)",
            kind=gap.kind, sample=gap.sample, hint=gap.hint, compared=True,
        )
        for gap in _representatives(large)
    ]  # fmt: skip
    unknown = [gap for gap in compared.gaps if gap.undefined and gap not in large]
    small = [gap.size for gap in compared.gaps if 0 < gap.size <= floor]
    note = f"differences of up to {max(small, default=0):.1g} are rounding (floor {floor:.1g})"
    scale = largest(runner.base())
    return Outcome(
        tuple(findings),
        moved=len(large),
        pairs=len(compared.gaps),
        untested=len(unknown),
        trouble=_unknown(unknown),
        notes=(note,) if small else (),
        resolution=floor / scale if scale else 0.0,
    )


def _unknown(gaps: Sequence[RowGap]) -> tuple[str, ...]:
    if not gaps:
        return ()
    first = gaps[0]
    return (
        f"NaN or inf in both runs at {len(gaps)} outputs (first: sample {first.sample}, position "
        f"{first.query}, {first.kind}): whether they are equal is not known",
    )


def _undecided(gaps: Sequence[RowGap], floor: float) -> Outcome:
    if not gaps:
        return Outcome()
    most = max(gaps, key=lambda gap: gap.size)
    trouble = (
        f"{most.kind}: {len(gaps)} outputs differ in the model's own dtype (sample {most.sample}, "
        f"position {most.query} by {most.size:.3g}, rounding: {floor:.1g}) and not in float64: "
        "undecided; rounding flips a branch (a top-k, a bucket), or a fault of that dtype"
    )
    return Outcome(untested=len(gaps), trouble=(trouble,))


def _representatives(gaps: Sequence[RowGap]) -> list[RowGap]:
    """Pick the first and the largest gap of each kind."""
    kinds: dict[str, list[RowGap]] = {}
    for gap in gaps:
        kinds.setdefault(gap.kind, []).append(gap)
    picked = []
    for same in kinds.values():
        first = min(same, key=lambda gap: (gap.sample, gap.query))
        largest = max(same, key=lambda gap: gap.size)
        picked += dict.fromkeys([first, largest])
    return picked
