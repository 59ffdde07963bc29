"""The model under audit: its inputs and outputs, its state, its precision, and its runs."""

from __future__ import annotations

from clearhead.dependence.subject.inputs import (
    ContentInput,
    Key,
    ModelInputs,
    call,
    read_inputs,
)
from clearhead.dependence.subject.outputs import (
    OutputRows,
    difference,
    movement,
    outputs_of,
    rows_of,
    tensors_in,
)
from clearhead.dependence.subject.precision import float64_runner, most_exact, rounding_floor
from clearhead.dependence.subject.replacements import (
    Perturbation,
    Replacement,
    embedding_of,
    replacements,
    splice,
)
from clearhead.dependence.subject.runner import Runner, name_of
from clearhead.dependence.subject.state import Snapshot, modules_in, untouched

__all__ = [
    "ContentInput",
    "Key",
    "ModelInputs",
    "OutputRows",
    "Perturbation",
    "Replacement",
    "Runner",
    "Snapshot",
    "call",
    "difference",
    "embedding_of",
    "float64_runner",
    "modules_in",
    "most_exact",
    "movement",
    "name_of",
    "outputs_of",
    "read_inputs",
    "replacements",
    "rounding_floor",
    "rows_of",
    "splice",
    "tensors_in",
    "untouched",
]
