"""What comes out of the audited model, laid out as (batch, position, rest)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead._core import value_error
from clearhead.dependence.subject.inputs import ModelInputs

__all__ = [
    "Difference",
    "OutputRows",
    "difference",
    "largest",
    "movement",
    "outputs_of",
    "paired",
    "rows_of",
    "tensors_in",
    "undefined",
]


@dataclass(frozen=True)
class OutputRows:
    """One output tensor, viewed as (batch, position, everything else)."""

    name: str
    rows: Tensor


def outputs_of(answer: Any, inputs: ModelInputs) -> list[OutputRows]:
    """Find the outputs that have a position axis, by its size."""
    named = tensors_in(answer)
    found = [
        OutputRows(name, rows)
        for name, tensor in named
        if (rows := rows_of(tensor, inputs, strict=True)) is not None
    ]
    if not found:
        raise value_error(
            "model",
            f"must give an output with one entry for each of the {inputs.positions} positions",
            shapes={name or "output": tensor for name, tensor in named} or None,
            got="an output without tensors" if not named else None,
            hint="audit a function that returns such an output, e.g. `lambda ids: model(ids)[0]` or"
            " the hidden states before pooling; say axis= where positions are on another axis",
        )
    return found


def rows_of(tensor: Tensor, inputs: ModelInputs, *, strict: bool = False) -> Tensor | None:
    """View a tensor as (batch, position, rest), or None where no axis is as long as the input."""
    main, shape = inputs.main, tensor.shape
    axis = _position_axis(shape, main.axis, inputs.positions)
    if axis is None:
        flat = inputs.batch * inputs.positions
        if strict or not shape or shape[0] != flat or main.axis != 1:
            return None
        return tensor.reshape(inputs.batch, inputs.positions, -1)
    rows = tensor.movedim(axis, 0)
    if main.batch_axis is None:
        return rows.reshape(1, inputs.positions, -1)
    # With the position axis in front, the batch axis is the next one of the right size.
    sizes = list(rows.shape[1:])
    if inputs.batch not in sizes:
        return rows.reshape(1, inputs.positions, -1) if inputs.batch == 1 or not strict else None
    rows = rows.movedim(1 + sizes.index(inputs.batch), 0)
    return rows.reshape(inputs.batch, inputs.positions, -1)


def _position_axis(shape: torch.Size, usual: int, positions: int) -> int | None:
    # A map of queries and sources (weights, masks): the query axis is the one before the last.
    if len(shape) > 3 and shape[-1] == shape[-2] == positions:
        return len(shape) - 2
    if len(shape) > usual and shape[usual] == positions:
        return usual
    return next((axis for axis, size in enumerate(shape) if size == positions and axis), None)


def tensors_in(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """List the tensors in nested tuples, lists, dicts and dataclasses, with their dotted names."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if is_dataclass(value) and not isinstance(value, Mapping):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, tuple | list):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return []
    return [
        pair for key, item in items for pair in tensors_in(item, f"{name}.{key}" if name else key)
    ]


def movement(before: Sequence[OutputRows], after: Sequence[OutputRows]) -> Tensor:
    """Compute the largest change over all outputs of each (batch, position); inf for a new NaN."""
    if [a.rows.shape for a in before] != [a.rows.shape for a in after]:
        shapes = [tuple(a.rows.shape) for a in before], [tuple(a.rows.shape) for a in after]
        raise RuntimeError(f"the outputs changed their shapes: {shapes[0]} became {shapes[1]}")
    moves = [_moved(old.rows, new.rows) for old, new in zip(before, after, strict=True)]
    return torch.stack(torch.broadcast_tensors(*moves)).amax(0).cpu()


def largest(outputs: Sequence[OutputRows]) -> float:
    """Find the largest finite absolute value among the float outputs."""
    rows = [output.rows for output in outputs if output.rows.is_floating_point()]
    finite = [numbers for one in rows if len(numbers := one[torch.isfinite(one)])]
    return max((numbers.abs().max().item() for numbers in finite), default=0.0)


def undefined(outputs: Sequence[OutputRows]) -> Tensor:
    """Find the rows with NaN or inf in any output, bool (batch, position)."""
    rows = [output.rows for output in outputs]
    wrong = [
        ~torch.isfinite(one).all(-1) if one.is_floating_point() or one.is_complex()
        else torch.zeros(one.shape[:2], dtype=torch.bool, device=one.device)
        for one in rows
    ]  # fmt: skip
    return torch.stack(torch.broadcast_tensors(*wrong)).any(0).cpu()


def _moved(old: Tensor, new: Tensor) -> Tensor:
    if torch.equal(old, new):
        return torch.zeros(old.shape[:2], dtype=torch.float64)
    if old.is_complex() or old.dtype.itemsize > 4:
        size = (new - old).abs().double()
    else:
        size = (new.float() - old.float()).abs()
    size = torch.where(_same(old, new), 0.0, size).nan_to_num(torch.inf, torch.inf)
    return size.amax(-1).double().cpu()


class Difference(NamedTuple):
    """How far two runs differ in each row, and which rows have the same NaN or inf in both."""

    sizes: Tensor
    undefined: Tensor


def difference(pairs: Sequence[tuple[Tensor, Tensor]]) -> Difference:
    """Compare pairs of (row, rest); the size is inf where only one of two is NaN or inf."""
    sizes, undefined = [], []
    for one, two in pairs:
        gap = torch.where(_same(one, two), 0.0, (one.double() - two.double()).abs())
        sizes.append(gap.nan_to_num(torch.inf, torch.inf).amax(-1).cpu())
        undefined.append(~(torch.isfinite(one) & torch.isfinite(two)).all(-1).cpu())
    return Difference(torch.stack(sizes).amax(0), torch.stack(undefined).any(0))


def paired(
    one: Sequence[OutputRows], two: Sequence[OutputRows]
) -> list[tuple[OutputRows, OutputRows]]:
    """Pair the outputs of two runs by name, or by order where no name is in both."""
    by_name = {output.name: output for output in two}
    common = [(output, by_name[output.name]) for output in one if output.name in by_name]
    return common or list(zip(one, two, strict=False))


def _same(one: Tensor, two: Tensor) -> Tensor:
    return (one == two) | ((one != one) & (two != two))
