"""The questions that a sweep asks of a class, each an audit, and the rows that answer them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from clearhead._core import is_refusal
from clearhead.dependence.auditing import audit
from clearhead.dependence.library.rows import FAULT, FORMS, NOT_TESTED, UNFIT, Row, readable
from clearhead.dependence.report import Finding, Report
from clearhead.dependence.subject import tensors_in

__all__ = ["MEMORY_LIMIT", "Question", "Subjected", "answers", "asked", "questions", "reason_of"]

# How a call may differ from the plain one: some code is reached by one of them alone.
CALLS: dict[str, dict[str, Any]] = {
    "": {},
    "output_attentions=True": {"output_attentions": True},
    "use_cache=False": {"use_cache": False},
    "use_cache=True": {"use_cache": True},
}
SIDES, OF_ENCODER, ONCE = ("left", "right"), " of the encoder", ("",)
# The variants of each form, by the mapping of the class.
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "causal": {
        "causal": tuple(CALLS),
        "padding": SIDES,
        "documents": ONCE,
        "generation": ONCE,
        "batch": ONCE,
        "modes": ONCE,
    },
    "masked": {
        **dict.fromkeys(("causal", "documents", "generation"), ONCE),
        "padding": SIDES,
        "batch": ONCE,
        "modes": ONCE,
    },
    "encoder-decoder": {
        "causal": tuple(CALLS),
        "padding": (*SIDES, *(side + OF_ENCODER for side in SIDES)),
        "documents": ONCE,
        "generation": ONCE,
        "batch": ONCE,
        "modes": ONCE,
    },
}
# Questions that make no sense for a mapping.
UNFITTING = {
    ("masked", "causal"): "every position may read every other one",
    ("masked", "documents"): "packing is asked of causal classes",
    ("masked", "generation"): "it does not generate",
    ("encoder-decoder", "documents"): "packing is asked of causal classes",
}
KINDS = {
    "causal": "leak",
    "documents": "documents",
    "generation": "cache mask",
    "batch": "batch",
    "modes": "modes",
}
MEMORY_LIMIT = "does not fit into the memory limit"
# Padding of the encoder is seen in the outputs of so many decoder tokens.
DECODED = 4
# Notes that a row keeps of what the audit says, and of what the class says.
NOTES = 5


class Question(NamedTuple):
    """One audit of a class."""

    form: str
    variant: str = ""


class Subjected(Protocol):
    """What the questions need of what a library builds; see `making.Built`."""

    @property
    def model(self) -> Any:
        """The module, in eval mode."""
        ...

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the module."""
        ...

    @property
    def stream(self) -> str:
        """The name of the token ids whose positions are audited."""
        ...

    @property
    def vocabulary(self) -> int:
        """Ids below this number may take the place of others."""
        ...


class _Unfit(Exception):
    """The question makes no sense for this class."""


def questions(mapping: str, forms: Sequence[str]) -> list[Question]:
    """List what is asked of a class of this mapping."""
    variants = VARIANTS[mapping]
    return [Question(form, one) for form in FORMS if form in forms for one in variants[form]]


def asked(row: Row, question: Question) -> Row:
    """Put a question into a row."""
    call = CALLS[question.variant] if question.form == "causal" else {}
    return replace(row, form=question.form, variant=question.variant, call=dict(call))


def answers(row: Row, question: Question, built: Subjected) -> list[Row]:
    """Ask; one row for each kind of finding, or one that says that there is none.

    There is no row where the variant is what the class does anyway, as the plain question says.
    """
    row = asked(row, question)
    if (row.mapping, row.form) in UNFITTING:
        why = UNFITTING[row.mapping, row.form]
        return [replace(row, verdict=NOT_TESTED, reason=f"{UNFIT}{why}")]
    if _is_plain(row.call, built.model):
        return []
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            report = _ask(question, row.call, built)
            row = replace(row, logits=_largest(built, row.call))
            rows = list(_rows(row, report, built.model))
        except Exception as error:
            rows = [replace(row, verdict=NOT_TESTED, reason=reason_of(error))]
    heard = dict.fromkeys(readable(f"{w.category.__name__}: {w.message}") for w in said)
    notes = tuple(heard)[:NOTES]
    return [replace(one, notes=(*one.notes, *notes)) for one in rows]


def reason_of(error: BaseException) -> str:
    """Say why a question has no answer."""
    if isinstance(error, _Unfit):
        return f"{UNFIT}{error}"
    text = readable(f"{type(error).__name__}: {error}")
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return f"{MEMORY_LIMIT} ({text})"
    if is_refusal(error):
        return readable(error).partition("; got ")[0]
    return f"the class itself fails with {text}"


def _is_plain(call: dict[str, Any], model: Any) -> bool:
    config = getattr(model, "config", None)
    return any(getattr(config, name, None) is value for name, value in call.items())


def _largest(built: Subjected, call: dict[str, Any]) -> float:
    """Find the largest logit of the class."""
    with torch.no_grad():
        answer = built.model(**built.inputs, **call)
    named = tensors_in(answer)
    logits = next((t for name, t in named if name == "logits"), named[0][1] if named else None)
    if logits is None or not logits.is_floating_point():
        return 0.0
    finite = logits[torch.isfinite(logits)]
    return float(finite.abs().max()) if len(finite) else 0.0


def _ask(question: Question, call: dict[str, Any], built: Subjected) -> Report:
    ask = {
        "causal": _causal, "padding": _padding, "documents": _documents,
        "generation": _generation, "batch": _batch, "modes": _modes,
    }[question.form]  # fmt: skip
    return ask(built, question.variant, call)


def _causal(built: Subjected, variant: str, call: dict[str, Any]) -> Report:
    if call and not _takes(built.model, *call):
        raise _Unfit(f"its forward does not take {' and '.join(call)}")
    return audit(built.model, {**built.inputs, **call}, vocab=_ids_of(built), change=[built.stream])


def _padding(built: Subjected, variant: str, call: dict[str, Any]) -> Report:
    side = variant.removesuffix(OF_ENCODER)
    pad, inputs = _pad_id(built), built.inputs
    if variant.endswith(OF_ENCODER):
        if built.stream == "input_ids":
            raise _Unfit("it has no encoder that reads tokens")
        mask, model = "attention_mask", _EncoderPadding(built)
        inputs = {n: v for n, v in inputs.items() if not n.startswith("decoder_")}
        _must_take(built.model, mask, "input_ids")
    else:
        mask, model = built.stream.replace("input_ids", "attention_mask"), built.model
        _must_take(model, mask)
    return audit.padding(model, inputs, mask=mask, pad=pad, sides=(side,), vocab=_ids_of(built))


def _documents(built: Subjected, variant: str, call: dict[str, Any]) -> Report:
    _must_take(built.model, "position_ids")
    batch, length = built.inputs[built.stream].shape
    ids, restarts = _documents_of(length)
    inputs = {n: v for n, v in built.inputs.items() if n not in ("attention_mask", "use_cache")}
    inputs["position_ids"] = restarts.repeat(batch, 1)
    # transformers finds documents by their position ids only where nothing is cached.
    if _takes(built.model, "use_cache"):
        inputs["use_cache"] = False
    return audit.documents(built.model, inputs, ids, vocab=_ids_of(built), change=[built.stream])


def _generation(built: Subjected, variant: str, call: dict[str, Any]) -> Report:
    if not getattr(built, "caches", True):
        raise _Unfit("its forward takes no cache")
    chunks = getattr(built, "chunks", None)
    return audit.generation(built.model, built.inputs, chunks=chunks)


def _batch(built: Subjected, variant: str, call: dict[str, Any]) -> Report:
    return audit.batch(built.model, built.inputs, vocab=_ids_of(built), change=[built.stream])


def _modes(built: Subjected, variant: str, call: dict[str, Any]) -> Report:
    return audit.modes(built.model, built.inputs)


def _ids_of(built: Subjected) -> range:
    """The ids that mean nothing special to the class."""
    return range(getattr(built, "lowest", 0), built.vocabulary)


def _documents_of(length: int) -> tuple[Tensor, Tensor]:
    """Number three documents, and the positions in each."""
    ids = torch.arange(length) * 3 // length
    starts = torch.searchsorted(ids, ids)
    return ids, torch.arange(length) - starts


def _parameters(model: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(model, "forward", model)).parameters)


def _takes(model: Any, *names: str) -> bool:
    """Whether the class may take arguments of these names."""
    parameters = _parameters(model)
    any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return any_name or set(names) <= parameters.keys()


def _must_take(model: Any, *names: str) -> None:
    missing = [name for name in names if name not in _parameters(model)]
    if missing:
        raise _Unfit(f"its forward does not take {' and '.join(missing)}")


def _pad_id(built: Subjected) -> int:
    """Choose the token that is used as padding, as `audit.padding` does."""
    config = getattr(built.model, "config", None)
    get = getattr(built.model, "get_input_embeddings", None)
    size = getattr(get() if get else None, "num_embeddings", built.vocabulary)
    known = [getattr(config, name, None) for name in ("pad_token_id", "eos_token_id")]
    return next((token for token in known if isinstance(token, int) and 0 <= token < size), 0)


class _EncoderPadding(nn.Module):
    """The class as a function of its encoder's tokens: its logits stand at each of them."""

    def __init__(self, built: Subjected) -> None:
        super().__init__()
        self.inner = built.model
        self.decoded = built.inputs[built.stream][:1, :DECODED]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **rest: Any) -> dict[str, Tensor]:
        batch, length = input_ids.shape
        answer = self.inner(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=self.decoded.expand(batch, -1),
            **rest,
        )
        logits = answer["logits"].flatten(1)[:, None].expand(-1, length, -1)
        encoded = getattr(answer, "encoder_last_hidden_state", None)
        return {"logits": logits} if encoded is None else {"logits": logits, "encoder": encoded}


def _rows(row: Row, report: Report, model: Any) -> Iterator[Row]:
    """Turn a report into rows: the largest finding of each kind, or one row without any."""
    row = replace(
        row,
        covered=report.covered,
        resolution=report.resolution,
        notes=tuple(map(readable, (*report.trouble, *report.notes)))[:NOTES],
    )
    for finding in _largest_of_each_kind(report.findings):
        yield _found(row, finding, model)
    if report.findings:
        return
    if report.covered < 1 or not report.pairs:
        tested = f"tested {report.covered:.1%} of the pairs" if report.pairs else "nothing to test"
        reason = "; ".join([tested, *row.notes])
        yield replace(row, verdict=NOT_TESTED, reason=readable(reason))
    else:
        yield row


def _largest_of_each_kind(findings: Sequence[Finding]) -> list[Finding]:
    largest: dict[str, Finding] = {}
    for one in findings:
        if one.kind not in largest or one.size > largest[one.kind].size:
            largest[one.kind] = one
    return list(largest.values())


def _found(row: Row, finding: Finding, model: Any) -> Row:
    of_encoder = OF_ENCODER if row.variant.endswith(OF_ENCODER) else ""
    module = finding.module.removeprefix("inner." if of_encoder else "")
    return replace(
        row,
        verdict=FAULT,
        kind=_kind(row.form, finding.kind),
        detail=finding.kind + of_encoder,
        size=finding.size,
        floor=finding.floor,
        source=finding.source,
        query=finding.query,
        sample=finding.sample,
        output=finding.output,
        module=module,
        place=_place(model, module),
    )


def _kind(form: str, detail: str) -> str:
    if form == "padding":
        return "padding content" if detail.startswith("content") else "padding amount"
    return KINDS[form]


def _place(model: Any, module: str) -> str:
    """Name the file and the function that a module runs: the innermost of the class's library."""
    package = type(model).__module__.partition(".")[0]
    forward: Callable[..., Any] = type(_innermost(model, module, package)).forward
    code = inspect.unwrap(forward).__code__
    parts = Path(code.co_filename).parts
    start = len(parts) - parts[::-1].index(package) - 1 if package in parts else -1
    return f"{'/'.join(parts[start:])}, {inspect.unwrap(forward).__qualname__}"


def _innermost(model: Any, module: str, package: str) -> Any:
    """Find a module by its name; of one of torch, the first parent that is of the package."""
    modules = dict(model.named_modules(remove_duplicate=False))
    while module:
        found = modules.get(module)
        if found is not None and type(found).__module__.partition(".")[0] == package:
            return found
        module = module.rpartition(".")[0]
    return model
