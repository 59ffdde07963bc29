"""Does padding change what is real: its content, its amount, its side, the batch-mates?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead._core import type_error, value_error
from clearhead.dependence.forms.padded import PaddedBatch
from clearhead.dependence.options import AuditOptions
from clearhead.dependence.proof import (
    Comparison,
    RowGap,
    compare,
    decide,
    run_plan,
    trace_modules,
)
from clearhead.dependence.report import Finding, Outcome, Report
from clearhead.dependence.subject import (
    Measured,
    ModelInputs,
    Runner,
    comparison_floor,
    difference,
    embedding_of,
    float64_copy,
    name_of,
    paired,
    read_inputs,
    recorded_dtypes,
    replacements,
    untouched,
)

__all__ = ["audit_padding"]


def audit_padding(
    model: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    mask: str = "attention_mask",
    pad: int | None = None,
    amount: int = 3,
    sides: Sequence[str] = ("left", "right"),
    vocab: int | range | None = None,
    float64: bool = True,
) -> Report:
    """Pad each sample on each side, and see whether what is real comes out as it does alone.

    `inputs` is a dict with the tokens (or floats) and, unless nothing is padded, the mask (`mask=`
    is its key; 1 or True is real). Position ids that you pass go with their tokens; where you pass
    none, the model must find the positions itself. `pad=` is the token used as padding.
    """
    _check_arguments(inputs, amount, sides)
    read = read_inputs({name: value for name, value in inputs.items() if name != mask})
    real, stages = _real(inputs.get(mask), read), list[Outcome]()
    options = AuditOptions(vocab=vocab, float64=float64)
    with untouched(model) as restore:
        whole = replace(read, kwargs={**read.kwargs, mask: real.long()})
        pad_token = _pad_token(model, pad, whole)
        for side in sides:
            padded = PaddedBatch(read, real, mask, side, amount, pad_token)
            stages += _check_content(model, padded, restore, options)
            stages += _check_alone(model, padded, options)
    return Report.of(name_of(model), "padding changes nothing that is real", stages)


def _check_arguments(inputs: Any, amount: int, sides: Sequence[str]) -> None:
    if not isinstance(inputs, Mapping):
        raise type_error(
            "inputs",
            "must be a dict of keyword arguments, so that the padding mask has a name",
            got=type(inputs).__name__,
            hint="pass {'input_ids': ids, 'attention_mask': mask}, and mask= for another name",
        )
    unknown = [side for side in sides if side not in ("left", "right")]
    if unknown or amount < 1:
        raise value_error("sides", "are 'left' and 'right', amount at least 1", got=(sides, amount))


def _real(given: Any, read: ModelInputs) -> Tensor:
    size = (read.batch, read.positions)
    if given is None:
        return torch.ones(size, dtype=torch.bool)
    if not isinstance(given, Tensor) or tuple(given.shape) != size:
        raise value_error(
            "inputs", "need a mask of one number for each position",
            shapes={"mask": getattr(given, "shape", ()), "positions": size},
        )  # fmt: skip
    real = given.bool().cpu()
    if not real.any(1).all():
        raise value_error("inputs", "need a real position in every sample")
    return real


def _pad_token(model: object, pad: int | None, read: ModelInputs) -> int:
    """Return the token that was passed, the model's own, or 0."""
    if pad is not None or not read.main.tokens:
        return pad or 0
    embedding = embedding_of(model, read[read.main.key], read)
    config = getattr(model, "config", None)
    known = [getattr(config, name, None) for name in ("pad_token_id", "eos_token_id")]
    size = embedding.num_embeddings if embedding is not None else 0
    return next((token for token in known if isinstance(token, int) and 0 <= token < size), 0)


def _check_content(
    model: Any, padded: PaddedBatch, restore: Callable[[], list[str]], options: AuditOptions
) -> list[Outcome]:
    """Replace the content of the padding; outputs at real positions must not move."""
    others = replacements(model, padded.batch, options.changes, options.vocab)
    runner = Runner(model, padded.batch, others, restore)
    real = padded.real()
    forbidden = real[:, :, None] & ~real[:, None, :]
    found = run_plan(runner, forbidden)
    decided = decide(runner, found.suspects, forbidden, float64=options.float64)
    findings = tuple(_relabelled(finding, padded.side) for finding in decided.findings)
    return [found.outcome, decided._replace(findings=findings), runner.outcome]


def _relabelled(finding: Finding, side: str) -> Finding:
    return replace(
        finding,
        kind=f"content of the {side} padding",
        hint="the content of the padding reaches real positions: is the mask passed on?",
    )


def _check_alone(model: Any, padded: PaddedBatch, options: AuditOptions) -> list[Outcome]:
    """Compare each sample in the padded batch with the same sample alone, without padding."""
    own = Measured(model)
    exact = float64_copy(model, padded.batch) if options.float64 else None
    compared = [_comparison(one, padded) for one in (exact, own) if one is not None]
    return [*compare(*compared), Outcome(forwards=len(compared))]


def _comparison(measured: Measured, padded: PaddedBatch) -> Comparison:
    together = measured.runner(padded.batch)
    alone = [measured.runner(inputs) for inputs in padded.alone]

    def trace(gap: RowGap) -> Any:
        one, position = alone[gap.sample], gap.query - padded.start(gap.sample)
        return (
            trace_modules(one, one.inputs, 0, position),
            trace_modules(together, together.inputs, gap.sample, gap.query),
        )

    with recorded_dtypes() as seen:
        gaps = [gap for n, one in enumerate(alone) for gap in _gaps(padded, together, one, n)]
    return Comparison(together, gaps, comparison_floor(together, seen), trace)


def _gaps(padded: PaddedBatch, together: Runner, alone: Runner, sample: int) -> list[RowGap]:
    start = padded.start(sample)
    stop = start + len(padded.rows[sample])
    both = paired(alone.base(), together.base())
    found = difference([(one.rows[0], many.rows[sample, start:stop]) for one, many in both])
    source = 0 if padded.side == "left" else padded.size - 1
    hint = (
        f"sample {sample} alone gives another output than with padding on the {padded.side}: "
        "are positions counted over the padding (pass position_ids), or is it attended to?"
    )
    kind = f"amount of {padded.side} padding"
    sizes, undefined = found.sizes.tolist(), found.undefined.tolist()
    return [
        RowGap(source, start + n, size, kind, sample, hint, unknown)
        for n, (size, unknown) in enumerate(zip(sizes, undefined, strict=True))
    ]
