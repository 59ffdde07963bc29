"""Does padding change what is real: its content, its amount, its side, the company in a batch?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead._core import type_error, value_error
from clearhead.dependence.proof.changes import contents
from clearhead.dependence.proof.judge import judge, probe
from clearhead.dependence.proof.pairing import Row, compare, difference, exact
from clearhead.dependence.proof.place import Step, name_of, trace
from clearhead.dependence.proof.report import Report
from clearhead.dependence.proof.runner import Runner
from clearhead.dependence.proof.state import Snapshot, untouched
from clearhead.dependence.proof.subject import Inputs, Leaf, embedding_of, read_inputs

__all__ = ["audit_padding"]


def audit_padding(
    model: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    mask: str = "attention_mask",
    pad: int | None = None,
    amount: int = 3,
    sides: Sequence[str] = ("left", "right"),
    vocab: int | None = None,
    float64: bool = True,
) -> Report:
    """Pad each sample on each side, and see whether what is real comes out as it does alone.

    `inputs` is a dict with the tokens (or floats) and, unless nothing is padded, the mask (`mask=`
    is its key; 1 or True is real). Position ids that you pass go with their tokens; where you pass
    none, the model must find the positions itself. `pad=` is the token used as padding.
    """
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
    content = {name: value for name, value in inputs.items() if name != mask}
    read = read_inputs(content, axis=None, change=None)
    real = _real(inputs.get(mask), read)
    report = Report(name_of(model), "padding changes nothing that is real")
    with untouched(model) as restore:
        masked = {**read.kwargs, mask: real.long()}
        whole = Inputs((), masked, read.leaves, read.positions, read.batch)
        pad_token = _pad_token(model, pad, whole)
        for side in sides:
            padded = _Padded(read, real, mask, side, amount, pad_token)
            _check_content(model, padded, report, restore, vocab, float64)
            _check_alone(model, padded, report, restore, float64)
    report.covered = 1.0 if report.pairs else 0.0
    return report


def _real(given: Any, read: Inputs) -> Tensor:
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


def _pad_token(model: object, pad: int | None, read: Inputs) -> int:
    """Take the token that is asked for, the model's own, or 0."""
    if pad is not None or not read.leaves[0].tokens:
        return pad or 0
    embedding = embedding_of(model, read.content(read.leaves[0]), read)
    config = getattr(model, "config", None)
    known = [getattr(config, name, None) for name in ("pad_token_id", "eos_token_id")]
    size = embedding.num_embeddings if embedding is not None else 0
    return next((token for token in known if isinstance(token, int) and 0 <= token < size), 0)


class _Padded:
    """The real content of each sample, padded on one side in a batch, and alone."""

    def __init__(
        self, read: Inputs, real: Tensor, mask: str, side: str, amount: int, pad: int
    ) -> None:
        self.side, self.mask, self.read = side, mask, read
        self.rows = [row.nonzero().flatten() for row in real]
        self.size = max(map(len, self.rows)) + amount
        leaf = read.leaves[0]
        self.batch = self._inputs(
            {
                name: self._pad(value, leaf, pad if name == leaf.key else 0)
                for name, value in self._along()
            }
            | {mask: self._mask().long()}
        )
        self.alone = [
            self._inputs(
                {name: self._take(value, sample) for name, value in self._along()}
                | {mask: torch.ones(1, len(rows), dtype=torch.long)}
            )
            for sample, rows in enumerate(self.rows)
        ]

    def start(self, sample: int) -> int:
        return self.size - len(self.rows[sample]) if self.side == "left" else 0

    def _along(self) -> list[tuple[str, Tensor]]:
        """List the arguments that have one entry a position, in every sample."""
        size = (self.read.batch, self.read.positions)
        found = []
        for name, value in self.read.kwargs.items():
            if isinstance(value, Tensor) and value.shape[1:2] == size[1:] and value.ndim > 1:
                found.append((name, value.expand(size[0], *value.shape[1:])))
        return found

    def _inputs(self, changed: dict[str, Tensor]) -> Inputs:
        kwargs = {**self.read.kwargs, **changed}
        kwargs.pop("labels", None)
        leaf = self.read.leaves[0]
        ids = kwargs[str(leaf.key)]
        return Inputs((), kwargs, self.read.leaves, ids.shape[1], ids.shape[0])

    def _take(self, value: Tensor, sample: int) -> Tensor:
        return value[sample, self.rows[sample].to(value.device)][None]

    def _pad(self, value: Tensor, leaf: Leaf, fill: int) -> Tensor:
        shape = (len(self.rows), self.size, *value.shape[2:])
        padded = torch.full(shape, fill, dtype=value.dtype, device=value.device)
        for sample, rows in enumerate(self.rows):
            padded[sample, self.start(sample) :][: len(rows)] = self._take(value, sample)[0]
        return padded

    def _mask(self) -> Tensor:
        real = torch.zeros(len(self.rows), self.size, dtype=torch.bool)
        for sample, rows in enumerate(self.rows):
            real[sample, self.start(sample) :][: len(rows)] = True
        return real


def _check_content(
    model: Any, padded: _Padded, report: Report, restore: Any, vocab: int | None, float64: bool
) -> None:
    """Change what the padding holds; outputs at real positions must stay."""
    runner = Runner(model, padded.batch, contents(model, padded.batch, 2, vocab), restore)
    real = padded._mask()
    forbidden = real[:, :, None] & ~real[:, None, :]
    part = Report("", "")
    runner.base()
    judge(runner, probe(runner, forbidden, part), forbidden, part, float64=float64)
    report.findings += [_renamed(finding, padded.side) for finding in part.findings]
    report.pairs += part.pairs
    report.moved += part.moved
    report.forwards += runner.forwards
    report.notes += part.notes
    report.trouble += runner.failures


def _renamed(finding: Any, side: str) -> Any:
    return replace(
        finding,
        kind=f"content of the {side} padding",
        hint="what stands in the padding reaches real positions: is the mask passed on?",
    )


def _check_alone(model: Any, padded: _Padded, report: Report, restore: Any, float64: bool) -> None:
    """Compare each sample in the padded batch with the same sample alone, without padding."""
    model, dtype = exact(model, padded.batch, float64)
    restore = Snapshot(model).restore if dtype else restore
    fit = (lambda inputs: inputs.to(dtype)) if dtype else (lambda inputs: inputs)
    together = Runner(model, fit(padded.batch), [], restore)
    base, rows, alone = together.base(), [], []
    for sample, inputs in enumerate(padded.alone):
        runner = Runner(model, fit(inputs), [], restore)
        alone.append(runner)
        start = padded.start(sample)
        gaps = [
            difference(one.rows[0], many.rows[sample, start : start + len(one.rows[0])])
            for one, many in zip(runner.base(), base, strict=True)
        ]
        gap = torch.stack(gaps).amax(0)
        source = 0 if padded.side == "left" else padded.size - 1
        hint = (
            f"sample {sample} alone gives another output than with padding on the {padded.side}: "
            "are positions counted over the padding (pass position_ids), or is it attended to?"
        )
        kind = f"amount of {padded.side} padding"
        rows += [Row(source, start + n, float(g), kind, sample, hint) for n, g in enumerate(gap)]
        report.forwards += 1 / len(padded.rows)

    def place(row: Row) -> tuple[list[Step], list[Step]]:
        one = alone[row.sample]
        steps = trace(one, one.inputs, 0, row.query - padded.start(row.sample))
        return steps, trace(together, together.inputs, row.sample, row.query)

    compare(report, together, rows, together.floor(other_shapes=True), place)
