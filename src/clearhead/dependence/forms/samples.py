"""Does a sample see another sample, or a packed document another document?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead._core import value_error
from clearhead.dependence.proof.changes import Content, contents, splice
from clearhead.dependence.proof.judge import judge, probe
from clearhead.dependence.proof.place import name_of
from clearhead.dependence.proof.report import Report
from clearhead.dependence.proof.runner import Runner
from clearhead.dependence.proof.state import untouched
from clearhead.dependence.proof.subject import Inputs, Leaf, read_inputs
from clearhead.dependence.proof.trouble import look_for_trouble

__all__ = ["audit_batch", "document_ids"]


def audit_batch(
    model: Callable[..., Any],
    inputs: Any,
    *,
    axis: int | None = None,
    vocab: int | None = None,
    change: Sequence[int | str] | None = None,
    changes: int = 2,
    float64: bool = True,
) -> Report:
    """Change some samples of the batch, and see whether the others move.

    A single sample is put beside two changed copies of itself. In the findings `source` and
    `query` are numbers of samples.
    """
    read = read_inputs(inputs, axis=axis, change=change)
    if read.leaves[0].batch_axis is None:
        raise value_error(
            "inputs", "need a batch axis to tell samples apart",
            shapes={"inputs": read.content(read.leaves[0])}, hint="add it: inputs[None]",
        )  # fmt: skip
    report = Report(name_of(model), "the samples of a batch do not see each other")
    with untouched(model) as restore:
        if read.batch == 1:
            read = _company(read, contents(model, read, 2, vocab))
        others = contents(model, read, changes, vocab)
        turned = _turned(read)
        runner = Runner(model, turned, others, restore)
        look_for_trouble(runner, report)
        runner.single = True  # copies would have to stand along the axis that is under test
        forbidden = ~torch.eye(turned.positions, dtype=torch.bool)[None]
        suspects = probe(runner, forbidden, report)
        judge(runner, suspects, forbidden, report, float64=float64)
    report.trouble += sorted({f"fails on changed inputs: {text}" for text in runner.failures})
    report.covered *= not runner.noisy
    report.forwards = runner.forwards
    return report


def _company(read: Inputs, others: list[Content]) -> Inputs:
    """Make a batch of three: the sample and two with other content."""
    three = read.repeat(3)
    content: Content = {}
    for leaf in read.leaves:
        parts = [read.content(leaf), *[other[leaf.key] for other in others]]
        content[leaf.key] = torch.cat(parts, leaf.batch_axis or 0)
    return splice(three, content, torch.ones(three.batch, three.positions, dtype=torch.bool))


def _turned(read: Inputs) -> Inputs:
    """Take the samples for the positions, and the positions for the samples."""
    leaves = tuple(
        Leaf(leaf.key, leaf.batch_axis, leaf.axis, leaf.tokens)
        for leaf in read.leaves
        if leaf.batch_axis is not None
    )
    return Inputs(read.args, read.kwargs, leaves, read.batch, read.positions)


def document_ids(inputs: Any, ids: Any) -> Tensor:
    """Take the given ids, or number the documents by where the position ids start anew."""
    if ids is not None:
        return torch.as_tensor(ids)
    places = inputs.get("position_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(places, Tensor):
        raise value_error(
            "ids",
            "are needed to know which position belongs to which document",
            hint="pass ids=, one number a position, or position_ids that restart in the inputs",
        )
    starts = torch.ones_like(places, dtype=torch.bool)
    starts[..., 1:] = places[..., 1:] != places[..., :-1] + 1
    numbered = starts.long().cumsum(-1) - 1
    return numbered[0] if numbered.ndim == 2 and len(numbered) == 1 else numbered
