"""Does cached decoding, token by token or in chunks, give what one pass over everything gives?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from clearhead._core import value_error
from clearhead.dependence.forms.caches import find_step, without_cache
from clearhead.dependence.forms.decoding import ChunkedDecoding, StepFunction
from clearhead.dependence.proof import Comparison, RowGap, compare, trace_modules
from clearhead.dependence.report import Outcome, Report
from clearhead.dependence.subject import (
    Measured,
    ModelInputs,
    OutputRows,
    Runner,
    comparison_floor,
    difference,
    float64_copy,
    name_of,
    paired,
    read_inputs,
    recorded_dtypes,
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

    A cache is known by its name, where the model takes it and returns it (`cache`,
    `past_key_values`, `state`, ...); other models need
    `step(model, arguments, cache) -> (outputs, cache)`. `prefill` is the number of tokens before
    decoding begins (half by default), `chunks` the sizes of the chunks. In a finding `query` is
    the position that differs and `source` the one at which its chunk begins.
    """
    read = read_inputs(inputs)
    sizes = _chunk_sizes(read.positions, prefill, chunks)
    with untouched(model):
        step = step or find_step(model, read)
        exact = float64_copy(model, without_cache(read, model)) if float64 else None
        compared = [_comparison(one, read, step, sizes) for one in (exact, Measured(model)) if one]
    failures = dict.fromkeys(failure for _, failures in compared for failure in failures)
    comparisons = [comparison for comparison, _ in compared]
    outcomes = [*compare(*comparisons), *[one.runner.outcome for one in comparisons]]
    return Report.of(name_of(model), QUESTION, [*outcomes, *failures])


def _chunk_sizes(
    positions: int, prefill: int | None, chunks: Sequence[int] | None
) -> dict[str, list[int]]:
    prefill = prefill or (positions + 1) // 2
    if positions < 2:
        raise value_error("inputs", "need two positions, to decode one after the other", got=1)
    third = max(positions // 3, 1)
    thirds = [third, third, positions - 2 * third] if positions > 2 else [1] * positions
    chunks = list(chunks or thirds)
    if not 0 < prefill < positions or sum(chunks) != positions or min(chunks) < 1:
        raise value_error(
            "chunks", f"must add up to the {positions} positions", got=(prefill, chunks)
        )
    return {"token by token": [prefill] + [1] * (positions - prefill), "in chunks": chunks}


def _comparison(
    measured: Measured, read: ModelInputs, step: StepFunction, sizes: dict[str, list[int]]
) -> tuple[Comparison, list[Outcome]]:
    whole = measured.runner(without_cache(read, measured.model))
    ways = {kind: ChunkedDecoding(read, measured, step, chunks) for kind, chunks in sizes.items()}

    def trace(gap: RowGap) -> Any:
        decoded = ways[gap.kind].trace(gap.sample, gap.query, gap.source)
        return trace_modules(whole, whole.inputs, gap.sample, gap.query), decoded

    gaps, failures = list[RowGap](), list[Outcome]()
    with recorded_dtypes() as seen:
        whole.base()
        for kind, decoding in ways.items():
            known = len(gaps)
            try:
                for start, outputs in decoding.run():
                    gaps += _gaps(whole, kind, start, outputs)
            except Exception as error:
                failures.append(_failure(whole, kind, len(gaps) - known, error))
    return Comparison(whole, gaps, comparison_floor(whole, seen), trace), failures


def _failure(whole: Runner, kind: str, known: int, error: Exception) -> Outcome:
    rest = whole.inputs.batch * whole.inputs.positions - known
    message = str(error).partition("\n")[0]
    trouble = f"{kind}: the model itself fails with {type(error).__name__}: {message}"
    return Outcome(pairs=rest, untested=rest, trouble=(trouble,))


def _gaps(whole: Runner, kind: str, start: int, outputs: list[OutputRows]) -> Iterator[RowGap]:
    hint = f"decoding {kind} differs: is the mask or the position offset by the cache?"
    both = paired(whole.base(), outputs)
    stop = start + both[0][1].rows.shape[1]
    for sample in range(whole.inputs.batch):
        found = difference([(w.rows[sample, start:stop], c.rows[sample]) for w, c in both])
        values = zip(found.sizes.tolist(), found.undefined.tolist(), strict=True)
        for n, (size, unknown) in enumerate(values):
            yield RowGap(start, start + n, size, kind, sample, hint, unknown)
