"""Prove it: does anything flow outside the edges that a mask allows?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead._core import type_error, value_error
from clearhead.dependence.forms import (
    audit_batch,
    audit_generation,
    audit_modes,
    audit_padding,
    document_ids,
    inspect_weights,
)
from clearhead.dependence.options import AuditOptions
from clearhead.dependence.proof import (
    check_axes,
    check_repeatability,
    decide,
    run_plan,
    search,
)
from clearhead.dependence.report import Finding, Outcome, Report
from clearhead.dependence.subject import (
    ModelInputs,
    Runner,
    call,
    name_of,
    read_inputs,
    replacements,
    untouched,
)
from clearhead.masks import Mask, causal, document, no_mask

if TYPE_CHECKING:
    from clearhead.dependence.library import Row

__all__ = ["assert_causal", "audit"]

# The largest number of layers, each by the mask, that is tried to explain what was found.
DEEPEST = 65


class Audit:
    """Perturb inputs and see which outputs move: does anything flow outside the allowed edges?

    >>> import clearhead as ch, torch
    >>> from clearhead import masks
    >>> running = lambda x: x.cumsum(1)  # each output is the sum of the inputs so far
    >>> print(ch.audit(running, torch.randn(2, 5, 3)).ok)
    True
    >>> report = ch.audit(running, torch.randn(2, 5, 3), allowed=masks.window(2))
    >>> report.ok, report.findings[0].source, report.findings[0].query
    (False, 0, 2)

    `inputs` is a tensor, a tuple of arguments, or a dict of keyword arguments; only token ids and
    float inputs are perturbed, never masks or position ids (`change=` names others). `allowed` is a
    Mask (causal unless given), or a bool tensor (query, source). `depth=n` composes it with itself
    over n layers: a window of w over n layers reaches n * (w - 1) back. `budget=` is the largest
    number of perturbed inputs to run; the report's `covered` is the share of the pairs that was
    tested, and a report that covers less than 1.0 is not ok. `axis=` is the axis of the positions
    (by default 1 for token ids and (batch, position, ...) floats, 0 where there is no batch),
    `vocab=` the number of tokens where no embedding shows it, or the range of ids that may replace
    others, `changes=` how many replacements each position is given. `float64=False` measures in the
    model's own dtype, with a measured rounding floor.

    The other questions are `audit.padding`, `.batch`, `.documents`, `.generation` and `.modes`;
    `audit.library` asks all of them of every class of a library.
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
        vocab: int | range | None = None,
        change: Sequence[int | str] | None = None,
        changes: int = 2,
        float64: bool = True,
    ) -> Report:
        """Test every forbidden pair (source, query); see the class."""
        if not callable(model):
            raise type_error("model", "must be a module or a function", got=type(model).__name__)
        options = AuditOptions(depth, budget, axis, vocab, change, changes, float64)
        return _audit(model, inputs, causal() if allowed is None else allowed, options)

    def documents(
        self, model: Callable[..., Any], inputs: Any, ids: Any = None, **options: Any
    ) -> Report:
        """Test that no packed document reads another.

        `ids` gives each position the number of its document; without them documents begin where
        the `position_ids` in the inputs restart. Options are those of `audit`.
        """
        return self(model, inputs, document(document_ids(inputs, ids)), **options)

    def library(
        self, library: str = "transformers", out: str | Path | None = None, **options: Any
    ) -> list[Row]:
        """Audit tiny random copies of all classes of a library, as `clearhead audit --library`.

        `out` is the folder of the rows; see `audit_library` for the options.
        """
        from clearhead.dependence.library import audit_library

        return audit_library(library, out, **options)

    batch = staticmethod(audit_batch)
    generation = staticmethod(audit_generation)
    modes = staticmethod(audit_modes)
    padding = staticmethod(audit_padding)


audit = Audit()


def assert_causal(model: Callable[..., Any], inputs: Any, **options: Any) -> None:
    """Raise an AssertionError, detailed enough to fix the model, unless it is proven causal.

    It is raised where an output reads the future, and where not every pair of positions could be
    tested, or none.

    >>> import clearhead as ch, torch
    >>> ch.assert_causal(lambda x: x.cumsum(1), torch.randn(1, 4, 2))
    >>> ch.assert_causal(lambda x: x - x.mean(1, keepdim=True), torch.randn(1, 4, 2))
    ... # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    AssertionError: ...

    Options are those of `audit`.
    """
    report = audit(model, inputs, **options)
    if not report.ok or not report.pairs:
        raise AssertionError(f"\n{report}")


def _audit(
    model: Callable[..., Any], inputs: Any, allowed: Mask | Tensor, options: AuditOptions
) -> Report:
    read = read_inputs(inputs, axis=options.axis, change=options.change)
    layer = edges = _edges(allowed, read)
    for _ in range(options.depth - 1):
        edges = _composed(layer, edges)
    with untouched(model) as restore:
        _check_batch_axis(model, read)
        others = replacements(model, read, options.changes, options.vocab)
        runner = Runner(model, read, others, restore)
        stages = _proof(runner, ~edges, options)
        restore()
        notes = inspect_weights(model, read, layer, options.depth)
    findings = [finding for stage in stages for finding in stage.findings]
    if options.depth == 1 and findings:
        notes += _deeper(findings, layer)
    if edges.all():
        notes += ("nothing is forbidden at this size, so nothing could leak",)
    question = f"allowed: {_description(allowed, options.depth)}"
    return Report.of(name_of(model), question, [*stages, Outcome(notes=notes)])


def _proof(runner: Runner, forbidden: Tensor, options: AuditOptions) -> list[Outcome]:
    """Check what an audit relies on, search for suspects, and decide which of them leak."""
    repeatability = check_repeatability(runner)
    runner.single, runner.noisy = repeatability.single, repeatability.noisy
    separable = not (runner.draws or repeatability.trouble)
    axes = check_axes(runner, given=options.axis is not None)
    found = search(runner, forbidden, options.budget, separable=separable)
    decided = decide(runner, found.suspects, forbidden, float64=options.float64)
    if found.left is not None and not decided.findings:
        # The suspects that ended the search were rounding: test what it left.
        full = run_plan(runner, found.left)
        found = found._replace(suspects=full.suspects, untested=full.untested)
        decided = decide(runner, found.suspects, forbidden, float64=options.float64)
    return [repeatability.outcome, axes, found.outcome, decided, runner.outcome]


def _check_batch_axis(model: Callable[..., Any], read: ModelInputs) -> None:
    """Raise a ValueError where the model fails on token ids of one axis."""
    if not read.main.tokens or read.main.batch_axis is not None:
        return
    try:
        call(model, read)
    except Exception as error:
        message = str(error).partition("\n")[0]
        raise value_error(
            "inputs",
            f"the model fails on token ids of one axis ({type(error).__name__}: {message})",
            shapes={"ids": read[read.main.key]},
            hint="most models read (batch, position): ids[None] is a batch of one",
        ) from error


def _deeper(findings: Sequence[Finding], layer: Tensor) -> tuple[str, ...]:
    """Find over how many layers, each by this mask, everything that was found is allowed."""
    before = layer
    for depth in range(2, DEEPEST):
        edges = _composed(layer, before)
        if torch.equal(edges, before):
            break
        before = edges
        if all(bool(edges[f.sample if len(edges) > 1 else 0, f.query, f.source]) for f in findings):
            return (
                f"over {depth} layers, each by this mask, what was found is allowed: "
                f"depth={depth} (--depth {depth}) where `allowed` is meant for each layer",
            )
    return ()


def _edges(allowed: Mask | Tensor, read: ModelInputs) -> Tensor:
    """Return the edges of one layer, bool (batch or 1, query, source)."""
    positions, batch = read.positions, read.batch
    edges = _dense(allowed, positions, batch)
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


def _dense(allowed: Mask | Tensor, positions: int, batch: int) -> Tensor:
    if isinstance(allowed, Mask):
        return allowed.dense(positions, positions, batch=batch)
    if not isinstance(allowed, Tensor):
        raise no_mask("allowed", allowed)
    if allowed.dtype != torch.bool:
        raise type_error("allowed", "must be a Mask or a bool tensor", got=str(allowed.dtype))
    return allowed


def _composed(layer: Tensor, edges: Tensor) -> Tensor:
    """Add one more layer; a residual connection lets each position keep what it has."""
    step = layer | torch.eye(layer.shape[-1], dtype=torch.bool)
    return (step.float() @ edges.float()) > 0


def _description(allowed: Mask | Tensor, depth: int) -> str:
    name = "a bool tensor" if isinstance(allowed, Tensor) else repr(allowed)
    return name if depth == 1 else f"{name} over {depth} layers"
