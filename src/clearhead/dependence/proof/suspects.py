"""Search every forbidden pair for outputs that move: suspects, before rounding is measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.dependence.proof.plan import PlannedRun, make_plan
from clearhead.dependence.proof.separability import NotSeparable, reachable
from clearhead.dependence.report import Outcome
from clearhead.dependence.subject import Perturbation, Runner, undefined

__all__ = ["Search", "Suspect", "run_plan", "search"]

# Above so many multiplications a proof part by part is tried; so many runs then confirm it.
LONG, SOME_RUNS = 2e10, 16


@dataclass(frozen=True)
class Suspect:
    """An output that moved under a perturbation of sources it may not read."""

    sample: int
    query: int
    perturbation: Perturbation
    size: float
    floor: float = 0.0  # what rounding can do to it, once that is measured

    def size_in(self, moved: Tensor) -> float:
        """How far this output moved, out of (batch or 1, position)."""
        return float(moved[self.sample if len(moved) > 1 else 0, self.query])

    @property
    def place(self) -> tuple[int, int]:
        """The output that moved."""
        return self.sample, self.query


class Search(NamedTuple):
    """The suspects, and how many of the forbidden pairs were tested."""

    suspects: list[Suspect]
    pairs: int
    untested: int = 0
    notes: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()
    # The pairs of a run that ended early, because it had found suspects.
    left: Tensor | None = None

    @property
    def outcome(self) -> Outcome:
        """The findings of this stage; the next stage decides which suspects leak."""
        return Outcome(
            pairs=self.pairs, untested=self.untested, notes=self.notes, trouble=self.trouble
        )


def search(runner: Runner, forbidden: Tensor, budget: int | None, *, separable: bool) -> Search:
    """Test every forbidden pair, part by part where runs would take long, else run by run."""
    separable = separable and not undefined(runner.base()).any()
    if not separable or not _is_long(runner, forbidden):
        return run_plan(runner, forbidden, budget)
    try:
        reached = reachable(runner)
    except NotSeparable as reason:
        found = run_plan(runner, forbidden, budget)
        return found._replace(notes=(f"tested run by run: {reason}",))
    return _confirm(runner, forbidden, reached, budget)


def _confirm(runner: Runner, forbidden: Tensor, reached: Tensor, budget: int | None) -> Search:
    """Run the model as a whole on what can be reached though it is forbidden."""
    left, pairs = forbidden & reached, _count(runner, forbidden)
    note = (
        "proven part by part: everything but the attention calls works position by position "
        "(one run for each bit of the position), and one-hot values show each call's edges"
    )
    if not left.any():
        # A few runs of the whole model check the proof itself.
        suspects = run_plan(runner, forbidden, min(budget or 2, 2)).suspects
        return Search(suspects, pairs, notes=(note,))
    found = run_plan(runner, left, min(budget or SOME_RUNS, SOME_RUNS))
    if not found.suspects and budget is None:
        found = run_plan(runner, left)
    rest = left if found.untested and budget is None else None
    return Search(found.suspects, pairs, found.untested, (note,), left=rest)


def run_plan(runner: Runner, forbidden: Tensor, budget: int | None = None) -> Search:
    """Perturb what is forbidden, run by run, and collect every output that moved at all."""
    batch = runner.inputs.batch
    runs = _planned(runner, forbidden, budget)
    perturbations = [Perturbation(torch.from_numpy(run.sources), n) for run, n in runs]
    left, unknown = forbidden.expand(batch, -1, -1).clone(), undefined(runner.base())
    suspects: dict[tuple[int, int], Suspect] = {}
    moves = runner.movements(perturbations)
    for (run, _), perturbation, moved in zip(runs, perturbations, moves, strict=True):
        if moved is None:
            continue
        queries = torch.from_numpy(run.queries)
        known = queries & ~unknown.expand_as(queries)
        left &= ~(known[:, :, None] & perturbation.sources[:, None, :])
        for sample, query in (queries.expand_as(moved) & (moved > 0)).nonzero().tolist():
            size = float(moved[sample, query])
            old = suspects.get((sample, query))
            if old is None or size > old.size:
                suspects[sample, query] = Suspect(sample, query, perturbation, size)
    pairs = _count(runner, forbidden)
    # Where equal runs differ, an output that did not move further proves nothing.
    untested = pairs if runner.noisy else int(left.sum())
    return Search(list(suspects.values()), pairs, untested, trouble=_undefined(unknown))


def _undefined(unknown: Tensor) -> tuple[str, ...]:
    if not unknown.any():
        return ()
    sample, position = unknown.nonzero()[0].tolist()
    return (
        f"NaN or inf in the output at {int(unknown.sum())} of {unknown.numel()} positions (first: "
        f"sample {sample}, position {position}): whether these depend on an input is not known",
    )


def _planned(runner: Runner, forbidden: Tensor, budget: int | None) -> list[tuple[PlannedRun, int]]:
    """List the runs: each planned run with the number of its replacement."""
    plan, count = _batched_plan(forbidden, runner.inputs.batch), len(runner.replacements)
    if min(len(plan) * count, budget or 3) > 2:
        runner.enable_copies(64)
    if budget is None:
        return [(run, number) for number in range(count) for run in plan]
    # Every planned run once, with the replacements in turn, before any is run a second time.
    runs = [(run, (n + turn) % count) for turn in range(count) for n, run in enumerate(plan)]
    return runs[:budget]


def _batched_plan(forbidden: Tensor, batch: int) -> list[PlannedRun]:
    """Merge the plans of all samples: (batch, position) runs from (batch or 1, query, source)."""
    each = [make_plan(sample.numpy()) for sample in forbidden.cpu()]
    none = np.zeros(forbidden.shape[-1], bool)
    merged = []
    for together in zip_longest(*each, fillvalue=PlannedRun(none, none)):
        runs = together * batch if len(together) == 1 else together
        sources, queries = zip(*runs, strict=True)
        merged.append(PlannedRun(np.stack(sources), np.stack(queries)))
    return merged


def _is_long(runner: Runner, forbidden: Tensor) -> bool:
    """Estimate whether a run for each position would take more than a few seconds."""
    if not isinstance(runner.model, nn.Module):
        return False
    weights = sum(p.numel() for p in runner.model.parameters())
    positions = runner.inputs.batch * runner.inputs.positions
    rows = sum(len(sample.unique(dim=0)) for sample in forbidden)
    return 2 * weights * positions * rows * len(runner.replacements) > LONG


def _count(runner: Runner, forbidden: Tensor) -> int:
    return int(forbidden.sum()) * (runner.inputs.batch if len(forbidden) == 1 else 1)
