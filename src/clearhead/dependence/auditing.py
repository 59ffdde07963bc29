"""Prove it: does anything flow outside the edges that a mask allows?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead._core import type_error, value_error
from clearhead.dependence.forms.generation import audit_generation
from clearhead.dependence.forms.modes import audit_modes
from clearhead.dependence.forms.padding import audit_padding
from clearhead.dependence.forms.samples import audit_batch, document_ids
from clearhead.dependence.forms.weights import look_at_weights
from clearhead.dependence.proof.changes import contents
from clearhead.dependence.proof.judge import judge, suspicious
from clearhead.dependence.proof.place import name_of
from clearhead.dependence.proof.report import Finding, Report
from clearhead.dependence.proof.runner import Runner
from clearhead.dependence.proof.state import untouched
from clearhead.dependence.proof.subject import Inputs, call, read_inputs
from clearhead.dependence.proof.trouble import look_for_trouble
from clearhead.masks import Mask, causal, document, no_mask

__all__ = ["Finding", "Report", "assert_causal", "audit"]

# A mask that many layers compose to what was found is looked for up to here.
DEEPEST = 65


class Audit:
    """Change inputs and see which outputs move: does anything flow outside the allowed edges?

    >>> import clearhead as ch, torch
    >>> from clearhead import masks
    >>> running = lambda x: x.cumsum(1)  # each output is the sum of the inputs so far
    >>> print(ch.audit(running, torch.randn(2, 5, 3)).ok)
    True
    >>> report = ch.audit(running, torch.randn(2, 5, 3), allowed=masks.window(2))
    >>> report.ok, report.findings[0].source, report.findings[0].query
    (False, 0, 2)

    `inputs` is a tensor, a tuple of arguments, or a dict of keyword arguments; only token ids and
    float inputs are changed, never masks or position ids (`change=` names others). `allowed` is a
    Mask (causal unless given), or a bool tensor (query, source). `depth=n` composes it with itself
    over n layers: a window of w over n layers reaches n * (w - 1) back. `budget=` is the largest
    number of changed inputs to run; the report's `covered` says what share of the pairs was
    tested. `axis=` is the axis of the positions (1 for token ids and (batch, position, ...)
    floats), `vocab=` the number of tokens where no embedding tells it, `changes=` how many
    different contents each position is given. `float64=False` judges in the model's own dtype,
    with a measured floor.

    The other questions are `audit.padding`, `.batch`, `.documents`, `.generation` and `.modes`.
    """

    def __call__(
        self,
        model: Callable[..., Any],
        inputs: Any,
        allowed: Mask | Tensor | None = None,
        *,
        depth: int = 1,
        budget: int | None = None,
        axis: int | None = None,
        vocab: int | None = None,
        change: Sequence[int | str] | None = None,
        changes: int = 2,
        float64: bool = True,
    ) -> Report:
        """Test every forbidden pair (source, query); see the class."""
        _check(model, depth, budget, changes)
        if allowed is None:
            allowed = causal()
        read = read_inputs(inputs, axis=axis, change=change)
        layer = edges = _edges(allowed, read.positions, read.batch)
        for _ in range(depth - 1):
            edges = _over(layer, edges)
        report = Report(name_of(model), f"allowed: {_named(allowed, depth)}")
        with untouched(model) as restore:
            _runs_without_a_batch(model, read)
            others = contents(model, read, changes, vocab)
            runner = Runner(model, read, others, restore)
            look_for_trouble(runner, report)
            suspects = suspicious(runner, ~edges, report, budget)
            judge(runner, suspects, ~edges, report, float64=float64)
            restore()
            report.notes += look_at_weights(model, read, layer, depth)
        report.trouble += sorted({f"fails on changed inputs: {text}" for text in runner.failures})
        report.covered *= not runner.noisy
        report.forwards = runner.forwards
        if depth == 1 and report.findings:
            report.notes += _deeper(report, layer)
        if not report.pairs:
            report.notes.append("nothing is forbidden at this size, so nothing could leak")
        return report

    def documents(
        self, model: Callable[..., Any], inputs: Any, ids: Any = None, **options: Any
    ) -> Report:
        """Test that no packed document sees another.

        `ids` gives each position the number of its document; without them documents begin where
        the `position_ids` in the inputs begin anew. Options are those of `audit`.
        """
        return self(model, inputs, document(document_ids(inputs, ids)), **options)

    batch = staticmethod(audit_batch)
    generation = staticmethod(audit_generation)
    modes = staticmethod(audit_modes)
    padding = staticmethod(audit_padding)


audit = Audit()


def assert_causal(model: Callable[..., Any], inputs: Any, **options: Any) -> None:
    """Raise an AssertionError, good enough to mend the model from, if any output sees the future.

    >>> import clearhead as ch, torch
    >>> ch.assert_causal(lambda x: x.cumsum(1), torch.randn(1, 4, 2))
    >>> ch.assert_causal(lambda x: x - x.mean(1, keepdim=True), torch.randn(1, 4, 2))
    ... # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    AssertionError: ...

    Options are those of `audit`.
    """
    report = audit(model, inputs, **options)
    if not report.ok or report.covered < 1:
        raise AssertionError(f"\n{report}")


def _check(model: object, depth: int, budget: int | None, changes: int) -> None:
    if not callable(model):
        raise type_error("model", "must be a module or a function", got=type(model).__name__)
    for name, value in (("depth", depth), ("budget", budget), ("changes", changes)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise value_error(name, "must be a whole number of at least 1", got=repr(value))


def _runs_without_a_batch(model: Callable[..., Any], read: Inputs) -> None:
    """Say so where token ids of one axis are what the model fails on."""
    leaf = read.leaves[0]
    if not leaf.tokens or leaf.batch_axis is not None:
        return
    try:
        call(model, read)
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise value_error(
            "inputs",
            f"the model fails on token ids of one axis ({type(error).__name__}: {said})",
            shapes={"ids": read.content(leaf)},
            hint="most models read (batch, position): ids[None] is a batch of one",
        ) from error


def _deeper(report: Report, layer: Tensor) -> list[str]:
    """Say over how many layers, each by this mask, all that was found would be allowed."""
    before = layer
    for depth in range(2, DEEPEST):
        edges = _over(layer, before)
        if torch.equal(edges, before):
            break
        before = edges
        at = [(f.sample if len(edges) > 1 else 0, f.query, f.source) for f in report.findings]
        if all(bool(edges[place]) for place in at):
            return [
                f"over {depth} layers, each by this mask, what was found is allowed: "
                f"depth={depth} (--depth {depth}) where `allowed` is meant for each layer"
            ]
    return []


def _edges(allowed: Mask | Tensor, positions: int, batch: int) -> Tensor:
    """Give (batch or 1, query, source) bool: what may reach what in one layer."""
    if isinstance(allowed, Tensor):
        if allowed.dtype != torch.bool:
            raise type_error("allowed", "must be a Mask or a bool tensor", got=str(allowed.dtype))
        edges = allowed
    elif not isinstance(allowed, Mask):
        raise no_mask("allowed", allowed)
    else:
        edges = allowed.dense(positions, positions, batch=batch)
    if edges.ndim == 4:
        edges = edges.any(1)
    if edges.ndim == 2:
        edges = edges[None]
    if edges.shape[-2:] != (positions, positions) or edges.shape[0] not in (1, batch):
        raise value_error(
            "allowed",
            "must have one row and one column for each position of the inputs",
            shapes={"allowed": edges, "positions": (positions,), "batch": (batch,)},
        )
    return edges.cpu()


def _over(layer: Tensor, edges: Tensor) -> Tensor:
    """One more layer; a residual connection lets each position keep what it has."""
    step = layer | torch.eye(layer.shape[-1], dtype=torch.bool)
    return (step.float() @ edges.float()) > 0


def _named(allowed: Mask | Tensor, depth: int) -> str:
    name = "a bool tensor" if isinstance(allowed, Tensor) else repr(allowed)
    return name if depth == 1 else f"{name} over {depth} layers"
