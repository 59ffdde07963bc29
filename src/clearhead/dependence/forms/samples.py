"""Does a sample read another sample, or a packed document another document?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead._core import value_error
from clearhead.dependence.options import AuditOptions
from clearhead.dependence.proof import check_repeatability, decide, run_plan
from clearhead.dependence.report import BATCH, Outcome, Report
from clearhead.dependence.subject import (
    Key,
    ModelInputs,
    Replacement,
    Runner,
    name_of,
    read_inputs,
    replacements,
    splice,
    untouched,
)

__all__ = ["audit_batch", "document_ids"]


def audit_batch(
    model: Callable[..., Any],
    inputs: Any,
    *,
    axis: int | None = None,
    vocab: int | range | None = None,
    change: Sequence[Key] | None = None,
    changes: int = 2,
    float64: bool = True,
) -> Report:
    """Perturb some samples of the batch, and see whether the others move.

    A single sample is put beside two perturbed copies of itself. In the findings `source` and
    `query` are numbers of samples.
    """
    options = AuditOptions(axis=axis, vocab=vocab, change=change, changes=changes, float64=float64)
    read = read_inputs(inputs, axis=axis, change=change)
    if read.main.batch_axis is None:
        raise value_error(
            "inputs", "need a batch axis to separate the samples",
            shapes={"inputs": read[read.main.key]}, hint="add it: inputs[None]",
        )  # fmt: skip
    with untouched(model) as restore:
        if read.batch == 1:
            read = _with_batch_mates(read, replacements(model, read, 2, vocab))
        others = replacements(model, read, changes, vocab)
        runner = Runner(model, _transposed(read), others, restore)
        stages = _proof(runner, options)
    return Report.of(name_of(model), "the samples of a batch do not see each other", stages)


def _proof(runner: Runner, options: AuditOptions) -> list[Outcome]:
    repeatability = check_repeatability(runner)
    runner.noisy = repeatability.noisy
    runner.single = True  # copies would have to stand along the axis that is under test
    forbidden = ~torch.eye(runner.inputs.positions, dtype=torch.bool)[None]
    found = run_plan(runner, forbidden)
    decided = decide(runner, found.suspects, forbidden, float64=options.float64)
    # Hints speak of positions, and these are samples.
    findings = tuple(replace(finding, kind=BATCH, hint="") for finding in decided.findings)
    decided = decided._replace(findings=findings)
    return [repeatability.outcome, found.outcome, decided, runner.outcome]


def _with_batch_mates(read: ModelInputs, others: list[Replacement]) -> ModelInputs:
    """Make a batch of three: the sample and two with other content."""
    three = read.repeat(3)
    content: Replacement = {
        one.key: torch.cat(
            [read[one.key], *[other[one.key] for other in others]], one.batch_axis or 0
        )
        for one in read.content
    }
    return splice(three, content, torch.ones(three.batch, three.positions, dtype=torch.bool))


def _transposed(read: ModelInputs) -> ModelInputs:
    """Take the samples for the positions, and the positions for the samples."""
    content = tuple(
        replace(one, axis=one.batch_axis, batch_axis=one.axis)
        for one in read.content
        if one.batch_axis is not None
    )
    return replace(read, content=content, positions=read.batch, batch=read.positions)


def document_ids(inputs: Any, ids: Any) -> Tensor:
    """Return the given ids, or number the documents by where the position ids restart."""
    if ids is not None:
        return torch.as_tensor(ids)
    positions = inputs.get("position_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(positions, Tensor):
        raise value_error(
            "ids",
            "are needed to know which position belongs to which document",
            hint="pass ids=, one number a position, or position_ids that restart in the inputs",
        )
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[..., 1:] = positions[..., 1:] != positions[..., :-1] + 1
    numbered = starts.long().cumsum(-1) - 1
    return numbered[0] if numbered.ndim == 2 and len(numbered) == 1 else numbered
