"""The questions of `clearhead audit`, asked of a model by name."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor

from clearhead import masks, models
from clearhead._core import is_refusal
from clearhead.dependence import audit, read_ids
from clearhead.views import open_with_inputs

if TYPE_CHECKING:
    from clearhead.dependence import Report

__all__ = ["ask", "open_model"]


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
