"""Does cached decoding, token by token or in chunks, give what one pass over everything gives?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from clearhead._core import type_error, value_error
from clearhead.dependence.forms.decoding import ChunkedDecoding, StepFunction
from clearhead.dependence.proof import RowGap, compare, trace_modules
from clearhead.dependence.report import Outcome, Report
from clearhead.dependence.subject import (
    ModelInputs,
    Runner,
    difference,
    most_exact,
    name_of,
    read_inputs,
    rounding_floor,
    untouched,
)

__all__ = ["audit_generation"]

QUESTION = "cached decoding gives what one pass gives"


def audit_generation(
    model: Callable[..., Any],
    inputs: Any,
    *,
    prefill: int | None = None,
    chunks: Sequence[int] | None = None,
    step: StepFunction | None = None,
    float64: bool = True,
) -> Report:
    """Compare one pass with a prefill and single tokens, and with a prefill in chunks.

    Models with `past_key_values` (Hugging Face) or `cache` (this library) are known; others need
    `step(model, arguments, cache) -> (outputs, cache)`. `prefill` is the number of tokens before
    decoding begins (half by default), `chunks` the sizes of the chunks. In a finding `query` is
    the position that differs and `source` the one at which its chunk begins.
    """
    read = read_inputs(inputs)
    step = step or _step_of(model)
    if read.positions < 2:
        note = "one position: there is nothing to decode after it"
        return Report.of(name_of(model), QUESTION, [Outcome(notes=(note,))])
    sizes = _chunk_sizes(read.positions, prefill, chunks)
    with untouched(model):
        exact, dtype = most_exact(model, _without_cache(read, model), float64=float64)
        read = read.to(dtype) if dtype else read
        whole = Runner(exact, _without_cache(read, exact))
        ways = {kind: ChunkedDecoding(read, exact, step, of) for kind, of in sizes.items()}
        stages = _comparison(whole, ways)
    return Report.of(name_of(model), QUESTION, stages)


def _chunk_sizes(
    positions: int, prefill: int | None, chunks: Sequence[int] | None
) -> dict[str, list[int]]:
    prefill = prefill or (positions + 1) // 2
    third = max(positions // 3, 1)
    thirds = [third, third, positions - 2 * third] if positions > 2 else [1] * positions
    chunks = list(chunks or thirds)
    if not 0 < prefill < positions or sum(chunks) != positions or min(chunks) < 1:
        raise value_error(
            "chunks", f"must add up to the {positions} positions", got=(prefill, chunks)
        )
    return {"token by token": [prefill] + [1] * (positions - prefill), "in chunks": chunks}


def _comparison(whole: Runner, ways: dict[str, ChunkedDecoding]) -> list[Outcome]:
    floor, gaps = rounding_floor(whole, other_shapes=True), list[RowGap]()
    for kind, decoding in ways.items():
        gaps += _gaps(whole, kind, decoding)

    def trace(gap: RowGap) -> Any:
        decoded = ways[gap.kind].trace(gap.sample, gap.query, gap.source)
        return trace_modules(whole, whole.inputs, gap.sample, gap.query), decoded

    compared = compare(whole, gaps, floor, trace)
    return [compared, whole.outcome, Outcome(pairs=len(gaps), forwards=len(ways))]


def _gaps(whole: Runner, kind: str, decoding: ChunkedDecoding) -> list[RowGap]:
    hint = f"decoding {kind} differs: is the mask or the position offset by the cache?"
    gaps = []
    for start, outputs in decoding.run():
        for one, part in zip(whole.base(), outputs, strict=False):
            stop = start + part.rows.shape[1]
            for sample, rows in enumerate(part.rows):
                sizes = difference(one.rows[sample, start:stop], rows).tolist()
                gaps += [
                    RowGap(start, start + n, size, kind, sample, hint)
                    for n, size in enumerate(sizes)
                ]
    return gaps


def _without_cache(read: ModelInputs, model: Any) -> ModelInputs:
    names = inspect.signature(getattr(model, "forward", model)).parameters
    kwargs = {k: v for k, v in read.kwargs.items() if k not in ("past_key_values", "cache")}
    if "use_cache" in names:
        kwargs["use_cache"] = False
    return replace(read, kwargs=kwargs)


def _step_of(model: Any) -> StepFunction:
    names = inspect.signature(getattr(model, "forward", model)).parameters
    if "past_key_values" in names or hasattr(getattr(model, "config", None), "use_cache"):
        return _hugging_face
    if "cache" in names and hasattr(model, "new_cache"):
        return _own
    raise type_error(
        "model",
        "must take past_key_values (Hugging Face) or cache (clearhead.models)",
        got=f"{name_of(model)}({', '.join(names)})",
        hint="pass step=, a function (model, arguments, cache) -> (outputs, cache)",
    )


def _hugging_face(model: Any, arguments: dict[str, Any], cache: Any) -> tuple[Any, Any]:
    answer = model(**{**arguments, "past_key_values": cache, "use_cache": True})
    return {"logits": answer[0]}, answer.past_key_values


def _own(model: Any, arguments: dict[str, Any], cache: Any) -> tuple[Any, Any]:
    cache = model.new_cache() if cache is None else cache
    return model(**arguments, cache=cache), cache
