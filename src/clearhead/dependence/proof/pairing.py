"""Compare two runs that ought to give the same rows: in a batch or alone, cached or at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.dependence.proof.place import Step, first_difference, name_of
from clearhead.dependence.proof.report import Finding, Report
from clearhead.dependence.proof.runner import Runner, float64_copy
from clearhead.dependence.proof.subject import Inputs

__all__ = ["Row", "compare", "difference", "exact"]


@dataclass(frozen=True)
class Row:
    """Where two runs differ most, and how to say it."""

    source: int
    query: int
    size: float
    kind: str
    sample: int = 0
    hint: str = ""


def exact(model: Any, inputs: Inputs, wanted: bool) -> tuple[Any, torch.dtype | None]:
    """Give a float64 copy, where rounding is hardly taken for a difference; else the model."""
    double = float64_copy(model, inputs) if wanted else None
    return (model, None) if double is None else (double, torch.float64)


def difference(one: Tensor, two: Tensor) -> Tensor:
    """Give the largest difference of each row (position, rest); inf where one is NaN."""
    same = (one == two) | (one.isnan() & two.isnan())
    gap = (one.double() - two.double()).abs()
    return torch.where(same, 0.0, gap).nan_to_num(torch.inf, torch.inf).amax(-1).cpu()


def compare(
    report: Report,
    runner: Runner,
    rows: list[Row],
    floor: float,
    place: Callable[[Row], tuple[list[Step], list[Step]]] | None = None,
) -> None:
    """Turn rows that differ by more than rounding into findings, at most a few of each kind."""
    report.moved += sum(row.size > floor for row in rows)
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if row.size > floor:
            kinds.setdefault(row.kind, []).append(row)
    for kind, found in kinds.items():
        first = min(found, key=lambda row: (row.sample, row.query))
        largest = max(found, key=lambda row: row.size)
        for row in dict.fromkeys([first, largest]):
            module = first_difference(*place(row)) if place else ""
            report.findings.append(
                Finding(
                    row.source, row.query, row.size, floor,
                    module or f"{name_of(runner.model)} (its own forward)",
                    kind=kind, sample=row.sample, hint=row.hint,
                )
            )  # fmt: skip
    small = [row.size for row in rows if 0 < row.size <= floor]
    if small:
        report.notes.append(
            f"differences of up to {max(small):.1g} are rounding (floor {floor:.1g})"
        )
