"""The model under audit: its inputs and outputs, its state, its precision, and its runs."""

from __future__ import annotations

from clearhead.dependence.subject.inputs import (
    ContentInput,
    Key,
    ModelInputs,
    call,
    name_of,
    read_inputs,
)
from clearhead.dependence.subject.outputs import (
    Difference,
    OutputRows,
    difference,
    largest,
    movement,
    outputs_of,
    paired,
    rows_of,
    tensors_in,
    undefined,
)
from clearhead.dependence.subject.perturbation import (
    Perturbation,
    Replacement,
    embedding_of,
    replacements,
    splice,
)
from clearhead.dependence.subject.precision import Measured, float64_copy
from clearhead.dependence.subject.rounding import (
    MARGIN,
    comparison_floor,
    recorded_dtypes,
    rounding_floor,
    unit_of,
)
from clearhead.dependence.subject.runner import Runner
from clearhead.dependence.subject.state import Snapshot, modules_in, untouched

__all__ = [
    "MARGIN",
    "ContentInput",
    "Difference",
    "Key",
    "Measured",
    "ModelInputs",
    "OutputRows",
    "Perturbation",
    "Replacement",
    "Runner",
    "Snapshot",
    "call",
    "comparison_floor",
    "difference",
    "embedding_of",
    "float64_copy",
    "largest",
    "modules_in",
    "movement",
    "name_of",
    "outputs_of",
    "paired",
    "read_inputs",
    "recorded_dtypes",
    "replacements",
    "rounding_floor",
    "rows_of",
    "splice",
    "tensors_in",
    "undefined",
    "unit_of",
    "untouched",
]
