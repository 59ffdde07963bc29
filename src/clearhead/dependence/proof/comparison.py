"""Compare two runs that must give the same rows: in a batch or alone, cached or in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clearhead.dependence.proof.localization import ModuleCall, first_difference
from clearhead.dependence.report import Finding, Outcome
from clearhead.dependence.subject import Runner, name_of

__all__ = ["RowGap", "compare"]

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


def compare(
    runner: Runner, gaps: Sequence[RowGap], floor: float, trace: Callable[[RowGap], TracePair]
) -> Outcome:
    """Turn gaps larger than rounding into findings, at most two of each kind."""
    large = [gap for gap in gaps if gap.size > floor]
    own = f"{name_of(runner.model)} (its own forward)"
    findings = [
        Finding(
            gap.source, gap.query, gap.size, floor,
            first_difference(*trace(gap)) or own,
            kind=gap.kind, sample=gap.sample, hint=gap.hint,
        )
        for gap in _representatives(large)
    ]  # fmt: skip
    small = [gap.size for gap in gaps if 0 < gap.size <= floor]
    notes = (
        (f"differences of up to {max(small):.1g} are rounding (floor {floor:.1g})",)
        if small
        else ()
    )
    return Outcome(tuple(findings), moved=len(large), notes=notes)


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
