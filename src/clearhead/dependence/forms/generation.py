"""Does cached decoding, token by token or in chunks, give what one pass over everything gives?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead._core import type_error, value_error
from clearhead.dependence.proof.pairing import Row, compare, difference, exact
from clearhead.dependence.proof.place import Step, name_of, trace
from clearhead.dependence.proof.report import Report
from clearhead.dependence.proof.runner import Runner
from clearhead.dependence.proof.state import untouched
from clearhead.dependence.proof.subject import Inputs, read_inputs

__all__ = ["audit_generation"]

# Given the model, the keyword arguments of one chunk and the cache so far (None at first), answers
# with the chunk's outputs and the cache with the chunk in it.
StepFunction = Callable[[Any, dict[str, Any], Any], tuple[Any, Any]]


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
    read = read_inputs(inputs, axis=None, change=None)
    size = read.positions
    step = step or _step_of(model)
    report = Report(name_of(model), "cached decoding gives what one pass gives")
    if size < 2:
        report.notes.append("one position: there is nothing to decode after it")
        return report
    prefill = prefill or (size + 1) // 2
    chunks = list(chunks or _thirds(size))
    if not 0 < prefill < size or sum(chunks) != size or min(chunks) < 1:
        raise value_error("chunks", f"must add up to the {size} positions", got=(prefill, chunks))
    ways = {
        "token by token": [prefill] + [1] * (size - prefill),
        "in chunks": chunks,
    }
    with untouched(model):
        judged, dtype = exact(model, _without_cache(read, model), float64)
        read = read.to(dtype) if dtype else read
        whole = Runner(judged, _without_cache(read, judged), [])
        floor, rows = whole.floor(other_shapes=True), []
        for kind, sizes in ways.items():
            rows += _compare_way(whole, read, judged, step, kind, sizes)
            report.forwards += 1

        def place(row: Row) -> tuple[list[Step], list[Step]]:
            before = trace(whole, whole.inputs, row.sample, row.query)
            way = _Way(read, judged, step, ways[row.kind])
            return before, way.trace(row.sample, row.query, row.source)

        compare(report, whole, rows, floor, place)
    report.pairs = len(rows)
    report.forwards += whole.forwards
    return report


def _thirds(size: int) -> list[int]:
    part = max(size // 3, 1)
    return [part, part, size - 2 * part] if size > 2 else [1] * size


def _compare_way(
    whole: Runner, read: Inputs, model: Any, step: StepFunction, kind: str, sizes: list[int]
) -> list[Row]:
    way, rows = _Way(read, model, step, sizes), []
    for start, outputs in way.run():
        for one, part in zip(whole.base(), outputs, strict=False):
            stop = start + part.rows.shape[1]
            for sample in range(len(part.rows)):
                gap = difference(one.rows[sample, start:stop], part.rows[sample])
                hint = f"decoding {kind} differs: is the mask or the position offset by the cache?"
                rows += [
                    Row(start, start + n, float(g), kind, sample, hint) for n, g in enumerate(gap)
                ]
    return rows


class _Way:
    """One way to cut the positions into chunks that are decoded one after the other."""

    def __init__(self, read: Inputs, model: Any, step: StepFunction, sizes: Sequence[int]):
        self.read, self.model, self.step, self.sizes = read, model, step, sizes

    def run(self, watched: int | None = None, look: Any = None) -> list[tuple[int, list[Any]]]:
        from clearhead.dependence.proof.subject import outputs_of

        cache, start, found = None, 0, []
        for size in self.sizes:
            inputs = self._chunk(start, start + size)

            def forward(*args: Any, **kwargs: Any) -> Any:
                nonlocal cache
                answer, cache = self.step(self.model, self._named(args, kwargs), cache)
                return answer

            if watched == start:
                return look(Runner(_Held(forward, self.model), inputs, []))
            with torch.no_grad():
                answer = forward(*inputs.args, **inputs.kwargs)
            found.append((start, outputs_of(answer, inputs)))
            start += size
        return found

    def trace(self, sample: int, query: int, start: int) -> list[Step]:
        return self.run(start, lambda runner: trace(runner, runner.inputs, sample, query - start))  # type: ignore[return-value]

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = list(inspect.signature(getattr(self.model, "forward", self.model)).parameters)
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _chunk(self, start: int, stop: int) -> Inputs:
        read = self.read

        def cut(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim < 1:
                return value
            axis = min(1, value.ndim - 1)
            if value.shape[axis] != read.positions or name == "labels":
                return value
            # A padding mask speaks of all sources so far, the rest of the new positions.
            return (
                value.narrow(axis, 0, stop)
                if "mask" in name
                else value.narrow(axis, start, stop - start)
            )

        args = tuple(cut("", value) for value in read.args)
        kwargs = {name: cut(name, value) for name, value in read.kwargs.items()}
        return Inputs(args, kwargs, read.leaves, stop - start, read.batch)


class _Held:
    """A function that says which module it calls, so that a trace can hook it."""

    def __init__(self, function: Callable[..., Any], model: Any):
        self.function, self.__self__ = function, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _without_cache(read: Inputs, model: Any) -> Inputs:
    names = inspect.signature(getattr(model, "forward", model)).parameters
    kwargs = {k: v for k, v in read.kwargs.items() if k not in ("past_key_values", "cache")}
    if "use_cache" in names:
        kwargs["use_cache"] = False
    return Inputs(read.args, kwargs, read.leaves, read.positions, read.batch)


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
