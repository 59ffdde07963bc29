"""The questions of `clearhead audit`, asked of a model or of a class by name."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from clearhead import masks, models
from clearhead._core import is_refusal
from clearhead.dependence import audit, read_ids
from clearhead.dependence.library import LIBRARIES, audit_library
from clearhead.views import open_with_inputs

if TYPE_CHECKING:
    from clearhead.dependence import Report
    from clearhead.dependence.library import Row

__all__ = ["answer_of", "ask", "audit_class", "open_model"]

# The names of the tests, where the sweeps have other ones.
FORMS = {"causality": "causal"}


def open_model(spec: str, length: int) -> tuple[Any, Any]:
    """Load or make the model that `spec` names, and give it with its inputs."""
    kind, _, name = spec.partition(":")
    if kind == "hf-tiny":
        model = models.tiny_model(name)
        most = getattr(model.config, "max_position_embeddings", None) or length
        return model, models.named_inputs(model, models.random_tokens(model, min(length, most)))
    model, inputs, _ = open_with_inputs(name if kind == "hf" else spec, None, length)
    return model, inputs


def ask(
    question: str, model: Any, inputs: Any, allowed: str, documents: str | None
) -> tuple[Report | None, str]:
    """Give the report of a question, or None and the reason why it has no subject."""
    edges = masks.parse(allowed)
    ids = _ids(model, inputs, documents) if question == "documents" else []
    if ids is None:
        return None, "the model takes no position_ids that say where documents begin"
    known = (ValueError, TypeError, MemoryError, RuntimeError)
    try:
        with models.small_threads(model, _positions(inputs)), models.model_errors("model", *known):
            report = _ask(question, model, inputs, edges, ids)
    except (ValueError, TypeError) as error:
        # These two are about what was passed, the others about what a model does not take.
        if not is_refusal(error) or question in ("causality", "documents"):
            raise
        return None, str(error).replace("\n ", ";")
    if report.ok and not report.pairs:
        return None, "; ".join(["nothing was tested", *report.notes])
    return report, ""


def audit_class(name: str, asked: Sequence[str]) -> list[Row]:
    """Audit a tiny random copy of a class, and of its variants, as a sweep over its library does.

    The name is that of a class of transformers, or LIBRARY:NAME. A row's script is its text.
    """
    library, _, rest = name.partition(":")
    if library not in LIBRARIES or not rest:
        library, rest = "transformers", name
    forms = [FORMS.get(question, question) for question in asked]
    with tempfile.TemporaryDirectory() as folder:
        rows = audit_library(library, folder, [rest], forms, processes=1)
        return [_with_script(row, Path(folder)) for row in rows]


def _with_script(row: Row, folder: Path) -> Row:
    from dataclasses import replace

    if not row.script:
        return row
    return replace(row, script=(folder / row.script).read_text(encoding="utf-8"))


def answer_of(question: str, rows: Sequence[Row]) -> tuple[str, str]:
    """Give "passed", "failed" or "skipped", and the reason, from the rows of a class."""
    mine = [row for row in rows if row.form == FORMS.get(question, question)]
    faults = [_told(row) for row in mine if row.verdict == "fault"]
    lost = [f"NOT TESTED: {_place(row)}: {row.reason}" for row in mine if _is_lost(row)]
    if faults or lost:
        return "failed", "\n".join([*faults, *lost])
    if any(row.verdict != "not tested" for row in mine):
        return "passed", ""
    return "skipped", "; ".join(dict.fromkeys(row.reason for row in mine))


def _is_lost(row: Row) -> bool:
    """Whether a question has no answer for another reason than what the class is."""
    missing = row.reason.startswith("could not be built") or "has no cache" in row.reason
    return row.untested and not missing


def _place(row: Row) -> str:
    return f"{row.name}, {row.backend}, {row.question}"


def _told(row: Row) -> str:
    size = f"an output moves by {row.size:.3g}, the largest logit is {row.logits:.3g}"
    first = f"first in {row.module} ({row.place})" if row.place else f"first in {row.module}"
    script = f"\n\n{row.script}" if row.script else ""
    return f"{row.kind.upper()} in {_place(row)}: {size}, {first}{script}"


def _ask(question: str, model: Any, inputs: Any, edges: Any, ids: list[int]) -> Report:
    if question == "causality":
        return audit(model, inputs, edges)
    if question == "padding":
        return audit.padding(model, models.maskable_inputs(model, inputs))
    if question == "documents":
        packed = models.packed_inputs(model, inputs, ids)
        # transformers sees where documents begin only where nothing is cached.
        cached = getattr(getattr(model, "config", None), "use_cache", False)
        packed = {**packed, "use_cache": False} if cached else packed
        return audit.documents(model, packed, ids)
    return getattr(audit, question)(model, inputs)


def _ids(model: Any, inputs: Any, documents: str | None) -> list[int] | None:
    """Give the documents of each position; None where nothing tells the model about them."""
    if documents is not None:
        return read_ids("--clearhead-documents", documents)
    takes = inspect.signature(getattr(model, "forward", model)).parameters
    length = _positions(inputs)
    return [3 * n // length for n in range(length)] if "position_ids" in takes else None


def _positions(inputs: Any) -> int:
    """Give the length of the first input, which is (batch, position, ...)."""
    values = inputs.values() if isinstance(inputs, dict) else inputs
    first = inputs if isinstance(inputs, Tensor) else next(iter(values))
    return first.shape[1] if first.ndim > 1 else len(first)
