"""Narrow a leak down to one source, one query and one module, and give a hint at its cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.dependence.proof.localization import first_moved
from clearhead.dependence.proof.suspects import Suspect
from clearhead.dependence.report import Finding
from clearhead.dependence.subject import Perturbation, Runner

__all__ = ["INVERTED", "NEXT", "narrowed", "remeasured", "representatives"]

# So many outputs are narrowed down to their source; the report counts the others.
MOST_NARROWED = 8
NEXT = "it reads the very next position: an off-by-one in a mask, a shift or a padding?"
INVERTED = (
    "it reads none of the other positions that it may read: is the mask inverted (True must mean "
    "'may attend' for scaled_dot_product_attention, 'blocked' for nn.MultiheadAttention)?"
)


def remeasured(runner: Runner, suspects: Sequence[Suspect]) -> list[Suspect]:
    """Measure each suspect again, with one run for a perturbation that several share."""
    perturbations = {id(suspect.perturbation): suspect.perturbation for suspect in suspects}
    moves = runner.movements(list(perturbations.values()))
    by_id = dict(zip(perturbations, moves, strict=True))
    measured = []
    for suspect in suspects:
        moved = by_id[id(suspect.perturbation)]
        if moved is not None:
            measured.append(replace(suspect, size=suspect.size_in(moved)))
    return measured


def representatives(leaks: Sequence[Suspect]) -> list[Suspect]:
    """Pick the first, the last and the largest leaks, in the order of the queries."""
    order = sorted(leaks, key=lambda leak: (leak.sample, leak.query))
    largest = sorted(leaks, key=lambda leak: -leak.size)
    picked = {(leak.sample, leak.query): leak for leak in [*order[:2], *order[-1:]]}
    for leak in largest:
        if len(picked) < MOST_NARROWED:
            picked.setdefault((leak.sample, leak.query), leak)
    return [picked[key] for key in sorted(picked)]


def narrowed(runner: Runner, leak: Suspect, forbidden: Tensor) -> Finding:
    """Find the source of a leak and its module, by bisection."""
    floor = leak.floor
    perturbation, size, alone = _bisected(runner, leak, floor)
    sources = perturbation.sources[leak.sample].nonzero().flatten().tolist()
    source = sources[0]
    hint = _inverted(runner, leak, forbidden) or (NEXT if source == leak.query + 1 else "")
    if not alone:
        hint = f"only {len(sources)} sources changed together move it, {source} the first of them"
    module = first_moved(runner, perturbation, leak.sample, leak.query)
    return Finding(source, leak.query, size, floor, module, sample=leak.sample, hint=hint)


def _bisected(runner: Runner, leak: Suspect, floor: float) -> tuple[Perturbation, float, bool]:
    """Halve the perturbed sources until one is left that moves the query by itself."""
    perturbation, size = leak.perturbation, leak.size
    while (sources := perturbation.sources[leak.sample].nonzero().flatten()).numel() > 1:
        halves = [_only(perturbation, leak.sample, half) for half in sources.chunk(2)]
        best = _strongest(runner, halves, leak)
        if best[1] <= floor:
            singles = [_only(perturbation, leak.sample, source) for source in sources]
            best = _strongest(runner, singles, leak)
            if best[1] <= floor:
                return perturbation, size, False
        perturbation, size = best
    return perturbation, size, True


def _strongest(
    runner: Runner, perturbations: list[Perturbation], leak: Suspect
) -> tuple[Perturbation, float]:
    moves = runner.movements(perturbations)
    sizes = [0.0 if moved is None else leak.size_in(moved) for moved in moves]
    best = max(range(len(sizes)), key=sizes.__getitem__)
    return perturbations[best], sizes[best]


def _only(perturbation: Perturbation, sample: int, sources: Tensor) -> Perturbation:
    kept = torch.zeros_like(perturbation.sources)
    kept[sample, sources] = True
    return Perturbation(kept, perturbation.replacement)


def _inverted(runner: Runner, leak: Suspect, forbidden: Tensor) -> str:
    """Return a hint where the query reads nothing of what it may read."""
    row = forbidden[leak.sample if len(forbidden) > 1 else 0, leak.query]
    others = ~row
    others[leak.query] = False
    # A position that may only look ahead proves nothing: the model may be causal as well.
    if not others[: leak.query].any():
        return ""
    perturbation = _only(leak.perturbation, leak.sample, others.nonzero().flatten())
    return "" if _strongest(runner, [perturbation], leak)[1] > 0 else INVERTED
