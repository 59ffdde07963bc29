"""Tell leaks from rounding, and narrow each leak down to one pair and one module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.dependence.proof.parts import CannotPart, reach
from clearhead.dependence.proof.place import first_moved
from clearhead.dependence.proof.plan import Probe, make_plan
from clearhead.dependence.proof.report import Finding, Report
from clearhead.dependence.proof.runner import Change, Runner, in_float64

__all__ = ["Suspect", "judge", "probe", "suspicious"]

# So many outputs are narrowed down to their source; the report counts the others.
MOST_NARROWED = 8
# From so many multiplications on a proof part by part is tried; runs for a leak it points at.
LONG, SOME_RUNS = 2e10, 16
NEXT = "it reads the very next position: an off-by-one in a mask, a shift or a padding?"
INVERTED = (
    "it reads none of the other positions that it may read: is the mask inverted (True must mean "
    "'may attend' for scaled_dot_product_attention, 'blocked' for nn.MultiheadAttention)?"
)


@dataclass(frozen=True)
class Suspect:
    """An output that moved under a change of sources it may not read."""

    sample: int
    query: int
    change: Change
    size: float


def plans(forbidden: Tensor, batch: int) -> list[Probe]:
    """Make one plan of (batch, position) probes from (batch or 1, query, source)."""
    each = [make_plan(part.numpy()) for part in forbidden.cpu()]
    none = np.zeros(forbidden.shape[-1], bool)
    merged = []
    for row in zip_longest(*each, fillvalue=Probe(none, none)):
        rows = row * batch if len(row) == 1 else row
        merged.append(
            Probe(np.stack([p.sources for p in rows]), np.stack([p.queries for p in rows]))
        )
    return merged


def probe(
    runner: Runner, forbidden: Tensor, report: Report, budget: int | None = None
) -> list[Suspect]:
    """Change what is forbidden, run by run, and collect every output that moved at all."""
    batch, contents = runner.inputs.batch, range(len(runner.contents))
    probes = plans(forbidden, batch)
    if min(len(probes) * len(contents), budget or 3) > 2:
        runner.use_copies(64)
    runs = (
        [(p, n) for n in contents for p in probes] if budget is None else _spread(probes, contents)
    )
    runs = runs[:budget]
    changes = [Change(torch.from_numpy(p.sources), n) for p, n in runs]
    left = forbidden.expand(batch, -1, -1).clone()
    suspects: dict[tuple[int, int], Suspect] = {}
    for (tested, _), change, moved in zip(runs, changes, runner.move(changes), strict=True):
        if moved is None:
            continue
        queries = torch.from_numpy(tested.queries)
        left &= ~(queries[:, :, None] & change.sources[:, None, :])
        for sample, query in (queries.expand_as(moved) & (moved > 0)).nonzero().tolist():
            size = float(moved[sample, query])
            old = suspects.get((sample, query))
            if old is None or size > old.size:
                suspects[sample, query] = Suspect(sample, query, change, size)
    report.pairs = _count(runner, forbidden)
    report.covered = 1 - int(left.sum()) / report.pairs if report.pairs else 1.0
    return list(suspects.values())


def suspicious(
    runner: Runner, forbidden: Tensor, report: Report, budget: int | None
) -> list[Suspect]:
    """Test every forbidden pair, part by part where the runs would take long, else run by run."""
    left = _prove_by_parts(runner, forbidden, report) if _is_long(runner, forbidden) else None
    if left is None:
        return probe(runner, forbidden, report, budget)
    whole = Report("", "")
    if left.any():
        suspects = probe(runner, left, whole, min(budget or SOME_RUNS, SOME_RUNS))
        if not suspects and budget is None:
            suspects = probe(runner, left, whole)
    else:
        # Whole runs check the proof itself.
        suspects = probe(runner, forbidden, Report("", ""), min(budget or 2, 2))
    report.pairs = _count(runner, forbidden)
    untested = (1 - whole.covered) * whole.pairs
    report.covered = 1 - untested / report.pairs if report.pairs else 1.0
    return suspects


def _is_long(runner: Runner, forbidden: Tensor) -> bool:
    """Guess whether a run for each position would take more than a few seconds."""
    if not isinstance(runner.model, nn.Module):
        return False
    weights = sum(p.numel() for p in runner.model.parameters())
    positions = runner.inputs.batch * runner.inputs.positions
    rows = sum(len(part.unique(dim=0)) for part in forbidden)
    return 2 * weights * positions * rows * len(runner.contents) > LONG


def _count(runner: Runner, forbidden: Tensor) -> int:
    return int(forbidden.sum()) * (runner.inputs.batch if len(forbidden) == 1 else 1)


def _prove_by_parts(runner: Runner, forbidden: Tensor, report: Report) -> Tensor | None:
    """Narrow what is forbidden down to what can be reached at all, or None where that fails."""
    if runner.single or runner.draws or report.trouble:
        return None
    try:
        reached = reach(runner)
    except CannotPart as reason:
        report.notes.append(f"tested run by run: {reason}")
        return None
    left = forbidden & reached
    report.notes.append(
        "proven part by part: everything but the attention calls works position by position "
        "(one run for each bit of the position), and one-hot values show each call's edges"
    )
    return left


def _spread(probes: list[Probe], contents: range) -> list[tuple[Probe, int]]:
    """Order a limited number of runs: every probe once, the contents in turn, before any twice."""
    count = len(contents)
    return [(p, (n + turn) % count) for turn in contents for n, p in enumerate(probes)]


def judge(
    runner: Runner,
    suspects: Sequence[Suspect],
    forbidden: Tensor,
    report: Report,
    *,
    float64: bool = True,
) -> None:
    """Keep the suspects that are no rounding, and say which pair and which module each is."""
    if not suspects:
        return
    double = in_float64(runner) if float64 else None
    judging = double or runner
    if double is not None:
        double.copies = runner.copies if double.use_copies(runner.copies) else 1
        suspects = _again(double, suspects)
    floor = judging.floor()
    leaks = [suspect for suspect in suspects if suspect.size > floor]
    report.moved = len({(leak.sample, leak.query) for leak in leaks})
    small = [suspect for suspect in suspects if 0 < suspect.size <= floor]
    if small and double is not None:
        largest = max(suspect.size for suspect in small)
        report.notes.append(
            f"{len(small)} outputs moved by rounding only (in float64 by at most {largest:.1g}, "
            f"floor {floor:.1g})"
        )
    elif small:
        report.notes.append(
            f"{len(small)} outputs moved by less than rounding can ({floor:.2g}): undecided; "
            "pass the module itself, so that it can be judged in float64"
        )
    for leak in _chosen(leaks):
        report.findings.append(_finding(judging, leak, forbidden, floor))
    inverted = any(found.hint == INVERTED for found in report.findings)
    if leaks and not inverted and _reads_both_sides(judging, forbidden, floor):
        report.findings = [
            replace(found, hint="" if found.hint == NEXT else found.hint)
            for found in report.findings
        ]
        report.notes.append(
            "every output depends on the last input: is the model meant to read both sides, as a "
            "BERT does? then allowed=masks.everything() (--allowed everything)"
        )
    if double is not None:
        runner.forwards += double.forwards
        if leaks:
            report.notes.append("sizes were measured on a float64 copy of the model")


def _again(runner: Runner, suspects: Sequence[Suspect]) -> list[Suspect]:
    """Measure each suspect anew, the changes that several share only once."""
    changes = {id(suspect.change): suspect.change for suspect in suspects}
    moves = dict(zip(changes, runner.move(list(changes.values())), strict=True))
    measured = []
    for suspect in suspects:
        moved = moves[id(suspect.change)]
        if moved is not None:
            size = float(moved[suspect.sample if len(moved) > 1 else 0, suspect.query])
            measured.append(Suspect(suspect.sample, suspect.query, suspect.change, size))
    return measured


def _chosen(leaks: list[Suspect]) -> list[Suspect]:
    """Pick the first, the last and the largest leaks, in the order of the queries."""
    order = sorted(leaks, key=lambda leak: (leak.sample, leak.query))
    largest = sorted(leaks, key=lambda leak: -leak.size)
    picked = {(leak.sample, leak.query): leak for leak in [*order[:2], *order[-1:]]}
    for leak in largest:
        if len(picked) < MOST_NARROWED:
            picked.setdefault((leak.sample, leak.query), leak)
    return [picked[key] for key in sorted(picked)]


def _finding(runner: Runner, leak: Suspect, forbidden: Tensor, floor: float) -> Finding:
    change, size, alone = _narrow(runner, leak, floor)
    source = int(change.sources[leak.sample].nonzero()[0])
    hint = _polarity(runner, leak, forbidden) or _distance(source, leak.query)
    if not alone:
        count = int(change.sources[leak.sample].sum())
        hint = f"only {count} sources changed together move it, {source} the first of them"
    module = first_moved(runner, change, leak.sample, leak.query)
    return Finding(source, leak.query, size, floor, module, sample=leak.sample, hint=hint)


def _narrow(runner: Runner, leak: Suspect, floor: float) -> tuple[Change, float, bool]:
    """Halve the changed sources until one is left that moves the query by itself."""
    change, size = leak.change, leak.size
    while (sources := change.sources[leak.sample].nonzero().flatten()).numel() > 1:
        halves = [_only(change, leak.sample, part) for part in sources.chunk(2)]
        best = _strongest(runner, halves, leak)
        if best[1] <= floor:
            singles = [_only(change, leak.sample, source) for source in sources]
            best = _strongest(runner, singles, leak)
            if best[1] <= floor:
                return change, size, False
        change, size = best
    return change, size, True


def _strongest(runner: Runner, changes: list[Change], leak: Suspect) -> tuple[Change, float]:
    moves = runner.move(changes)
    sizes = [
        0.0 if moved is None else float(moved[leak.sample if len(moved) > 1 else 0, leak.query])
        for moved in moves
    ]
    best = max(range(len(sizes)), key=sizes.__getitem__)
    return changes[best], sizes[best]


def _only(change: Change, sample: int, sources: Tensor) -> Change:
    kept = torch.zeros_like(change.sources)
    kept[sample, sources] = True
    return Change(kept, change.content)


def _polarity(runner: Runner, leak: Suspect, forbidden: Tensor) -> str:
    """Say so where the query reads nothing of what it may read."""
    row = forbidden[leak.sample if len(forbidden) > 1 else 0, leak.query]
    others = ~row
    others[leak.query] = False
    # A position that may only look ahead proves nothing: the model may be causal as well.
    if not others[: leak.query].any():
        return ""
    change = _only(leak.change, leak.sample, others.nonzero().flatten())
    if _strongest(runner, [change], leak)[1] > 0:
        return ""
    return INVERTED


def _distance(source: int, query: int) -> str:
    return NEXT if source == query + 1 else ""


def _reads_both_sides(runner: Runner, forbidden: Tensor, floor: float) -> bool:
    """Whether all earlier outputs depend on the last input, where only the future is forbidden."""
    size = forbidden.shape[-1]
    future = torch.ones(size, size, dtype=torch.bool).triu(1)
    if size < 3 or not torch.equal(forbidden.cpu(), future.expand_as(forbidden)):
        return False
    last = torch.zeros(runner.inputs.batch, size, dtype=torch.bool)
    last[:, -1] = True
    changes = [Change(last, number) for number in range(len(runner.contents))]
    moves = [moved for moved in runner.move(changes) if moved is not None]
    return bool(moves) and bool((torch.stack(moves).amax(0)[:, :-1] > floor).all())
